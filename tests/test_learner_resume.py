"""Case 86: N steps straight are k steps, files, a fresh learner and N - k steps, bit for bit: weights, moments, step count and schedule.

The first steps are a supervised phase with an optimizer of its own; the schedule of those after it begins with them, warms up and decays.
"""

import dataclasses

import pytest
from learner_builders import drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec

from noria.adapters.versions import VersionFiles
from noria.types import LossSpec, OptimizerSpec

BATCHES = [pieces_of(random_groups(seed, num_groups=2)) for seed in range(6)]
PHASE, WARM_UP = 1, 2
SUPERVISED = {"loss": LossSpec(kind="cross_entropy"), "optimizer": OptimizerSpec(1e-3, warmup_steps=3)}
SPEC = spec("run")
SCHEDULE = {"warmup_steps": WARM_UP, "schedule": "cosine", "decay_steps": 6, "final_fraction": 0.1, "first_step": PHASE}
SPEC = dataclasses.replace(SPEC, optimizer=dataclasses.replace(SPEC.optimizer, grad_clip_norm=0.5, **SCHEDULE))
START = nonzero_state(7, SPEC)


def steps(learner, state, batches, run_spec=SPEC):
    """The states after each step of a run that starts from `state` on this learner."""
    learner.load_run(run_spec, state)
    states = []
    for number, pieces in enumerate(batches, state.num_steps):
        future = learner.train(run_spec.run_id, pieces, **(SUPERVISED if number < PHASE else {}))
        drain(learner)
        states.append(future.result(0).state)
    return states


@pytest.fixture(scope="module")
def straight():
    return steps(make_learner(), START, BATCHES)


@pytest.mark.parametrize("k", range(len(BATCHES)))
def test_a_run_resumed_from_files_on_a_fresh_learner_goes_on_bit_for_bit(tmp_path, straight, k):
    first = steps(make_learner(), START, BATCHES[:k])
    record = VersionFiles(tmp_path).write("run", k, (START, *first)[k], SPEC.lora.rank)
    state = VersionFiles(tmp_path).load(record, 8)
    fresh = make_learner()
    fresh.load_run(spec("neighbour"), nonzero_state(1, spec("neighbour")))  # so that the run gets another slot than before
    rest = steps(fresh, state, BATCHES[k:])
    assert len(first + rest) == len(straight)
    for number, (resumed, expected) in enumerate(zip(first + rest, straight, strict=True), 1):
        assert resumed.num_steps == expected.num_steps == number
        assert same_bytes(resumed, expected)


def test_the_comparison_sees_a_schedule_or_moments_that_start_again(straight):
    k = PHASE + WARM_UP + 1  # in the decay
    kept = straight[k - 1]
    for forgetful in (
        kept._replace(num_steps=PHASE),
        kept._replace(first_moment=START.first_moment),
        kept._replace(second_moment=START.second_moment),
    ):
        assert not same_bytes(steps(make_learner(), forgetful, BATCHES[k : k + 1])[0].params, straight[k].params)
