"""Metrics of each kind: the run's own means, by plain counting, and only those that mean something."""

import math

import numpy as np
import pytest
from loss_cases import PLAIN, run
from losses_reference import Sequence_, Token

from noria.rl.losses import LOSSES, run_metrics
from noria.types import LossSpec

COMMON = {"loss", "num_entries", "entropy_mean"}
RATIO = COMMON | {"ratio_mean", "mismatch_kl", "capped_fraction", "masked_fraction", "masked_sequence_fraction"}
CLIPPED = RATIO | {"clipped_fraction"}
NAMES = {
    "grpo": CLIPPED,
    "cross_entropy": COMMON | {"nll_mean"},
    "importance_sampling": RATIO,
    "ppo": CLIPPED,
    "cispo": CLIPPED,
    "dro": RATIO,
    "gspo": CLIPPED,
    "ppo_critic": CLIPPED | {"value_mean", "value_error", "value_clipped_fraction", "explained_variance"},
    "dpo": COMMON | {"num_pairs", "pair_accuracy", "margin_mean"},
    "linear": COMMON,
    "stable_reinforce": RATIO,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_each_kind_has_its_own_metrics_and_those_of_nothing_are_zero(kind):
    _, sums = run([Sequence_(1, [Token(-1.0, -1.0)])], {0: PLAIN[kind], 1: PLAIN[kind]})
    assert run_metrics(sums, 1, kind).keys() == NAMES[kind]
    assert run_metrics(sums, 0, kind) == dict.fromkeys(NAMES[kind], 0.0)


def test_metrics_of_a_policy_loss_are_the_runs_own_means():
    log_ratios = np.array([0.0, np.log(3.0), -np.log(2.0)])
    one = Sequence_(2, [Token(x - 1, -1.0, 2.0, 0.25, entropy=0.5) for x in log_ratios])
    _, sums = run([Sequence_(0, [Token(-5.0, -1.0, -1.0)]), one], {2: LossSpec(sequence_mask_c=0.0)})
    expected = {
        "loss": -0.25 * 2.0 * (1.0 + 2.0 + 0.5),
        "num_entries": 3.0,
        "ratio_mean": (1 + 3 + 0.5) / 3,
        "mismatch_kl": (log_ratios**2).mean() / 2,
        "capped_fraction": 1 / 3,
        "clipped_fraction": 0.0,
        "masked_fraction": 0.0,
        "masked_sequence_fraction": 0.0,
        "entropy_mean": 0.5,
    }
    assert run_metrics(sums, 2, "grpo") == pytest.approx(expected, rel=1e-6)


def test_masks_are_counted_by_token_and_by_sequence():
    sequences = [Sequence_(0, [Token(-1.0, -1.0), Token(-1.0, -3.0)]), Sequence_(0, [Token(-1.0, -1.0)]), Sequence_(0, [Token(-1.0, -1.1)])]
    _, sums = run(sequences, {0: LossSpec(icepop_low=0.5, icepop_high=5.0)})
    metrics = run_metrics(sums, 0, "grpo")
    assert metrics["masked_fraction"] == 0.25
    assert metrics["masked_sequence_fraction"] == pytest.approx(1 / 3)


def test_kl_is_reported_where_it_is_on():
    one = Sequence_(0, [Token(-1.0, -1.0, ref=-1.5), Token(-1.0, -1.0, ref=-0.5)])
    for estimator, expected in (("k1", 0.0), ("k2", 0.125), ("k3", (math.exp(-0.5) + math.exp(0.5) - 2) / 2)):
        _, sums = run([one], {0: LossSpec(kl_coeff=0.1, kl_estimator=estimator)})
        assert run_metrics(sums, 0, "grpo")["kl_mean"] == pytest.approx(expected, rel=1e-5)
    _, sums = run([one], {0: LossSpec()})
    assert "kl_mean" not in run_metrics(sums, 0, "grpo")


def test_metrics_of_cross_entropy_have_no_ratio():
    one = Sequence_(3, [Token(th, 0.0, -3.0, 0.25) for th in (-2.0, -0.5, -1.0)])
    _, sums = run([Sequence_(0, [Token(-5.0, -1.0)]), one], {3: LossSpec(kind="cross_entropy")})
    expected = {"loss": -0.25 * -3.0 * -3.5, "num_entries": 3.0, "entropy_mean": 1.0, "nll_mean": 3.5 / 3}
    assert run_metrics(sums, 3, "cross_entropy") == pytest.approx(expected, rel=1e-6)


def test_metrics_of_a_critic():
    values, returns = np.array([0.5, 1.0, -1.0]), np.array([1.0, 2.0, -2.0])
    tokens = [Token(-1.0, -1.0, 0.0, value=v, old_value=v - 0.5, ret=r) for v, r in zip(values, returns, strict=True)]
    _, sums = run([Sequence_(0, tokens)], {0: PLAIN["ppo_critic"]})
    metrics = run_metrics(sums, 0, "ppo_critic")
    assert metrics["value_mean"] == pytest.approx(values.mean())
    assert metrics["value_error"] == pytest.approx(((values - returns) ** 2).mean())
    assert metrics["explained_variance"] == pytest.approx(1 - ((values - returns) ** 2).mean() / returns.var())
    assert metrics["value_clipped_fraction"] == pytest.approx(2 / 3), "moving away from the return is never clipped"


def test_metrics_of_pairs_count_pairs():
    def side(pair: int, advantage: float, *shifts: float) -> Sequence_:
        return Sequence_(0, [Token(-1.0, 0.0, advantage, 0.5, ref=-1.0 - x) for x in shifts], pair)

    right, wrong = [side(0, 1.0, 0.5, 0.5), side(0, -1.0, -1.0)], [side(1, 1.0, 0.5), side(1, -1.0, 2.5, 0.0, 0.0)]
    _, sums = run([right[0], wrong[0], right[1], wrong[1]], {0: LossSpec(kind="dpo", beta=0.1)})
    expected = {"num_pairs": 2.0, "pair_accuracy": 0.5, "margin_mean": 0.0, "num_entries": 7.0, "entropy_mean": 1.0}
    expected["loss"] = 0.5 * sum(math.log1p(math.exp(-margin)) for margin in (0.2, -0.2))
    assert run_metrics(sums, 0, "dpo") == pytest.approx(expected, abs=1e-6)
