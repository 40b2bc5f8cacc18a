"""What docs/results/convergence.md says of the exact prefix gradient, taken again: it learns what training without sharing learns."""

import json

import pytest

from noria.bench import convergence


@pytest.mark.prove
def test_exact_replay_learns_what_naive_training_learns():
    arms = [arm for arm in convergence.ARMS if arm.name in ("naive", "exact", "stop")]
    result = convergence.measure(arms=arms).as_json()
    print(json.dumps({key: result[key] for key in ("final_reward", "differences")}))
    exact = next(difference for difference in result["differences"] if difference["arm"] == "exact")
    assert -convergence.MARGIN < exact["low"] <= exact["high"] < convergence.MARGIN
    for curves in (result["curves"][name] for name in ("naive", "exact")):
        assert len(curves) == convergence.SEEDS
        for curve, final in zip(curves, convergence.final_rewards(curves), strict=True):
            assert final > curve[0] + 0.2, "all of it is about learning"
