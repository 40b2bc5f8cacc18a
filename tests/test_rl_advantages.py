"""Advantages: exact zeros, finite values, and agreement with the formulas written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import RewardNotFiniteError
from noria.rl.advantages import AdvantageKind, group_advantages

KINDS: tuple[AdvantageKind, ...] = ("mean", "mean_std", "leave_one_out")
rewards_lists = st.lists(st.floats(-100, 100, width=32), min_size=0, max_size=16)


def naive(rewards: list[float], kind: AdvantageKind) -> list[float]:
    n = len(rewards)
    if n < 2:
        return [0.0] * n
    mean = sum(rewards) / n
    if kind == "mean":
        return [r - mean for r in rewards]
    if kind == "leave_one_out":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    std = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
    return [(r - mean) / (std + 1e-6) for r in rewards]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [0.0, 0.95, 1 / 3, -7.1, 1e20])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8])
def test_equal_rewards_give_exactly_zero(kind, reward, size):
    advantages_G = group_advantages([reward] * size, kind)
    assert advantages_G.dtype == np.float32
    assert advantages_G.tolist() == [0.0] * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [0.95] * 7 + [0], [1.0], [0.0, 1.0], [1.0, 1.00001], [0.1 + 0.2, 0.3]])
def test_advantages_of_the_known_bad_groups_are_small_and_match_the_formula(kind, rewards):
    advantages_G = group_advantages(rewards, kind)
    assert np.abs(advantages_G).max() <= 10
    np.testing.assert_allclose(advantages_G, naive(rewards, kind), rtol=1e-5, atol=1e-12)


def test_a_narrow_group_is_not_shrunk_by_the_floor():
    np.testing.assert_allclose(group_advantages([1.0, 1.00001], "mean_std"), [-0.707, 0.707], atol=0.1)


@given(rewards_lists, st.sampled_from(KINDS))
def test_advantages_match_the_naive_formula_and_are_bounded(rewards, kind):
    advantages_G = group_advantages(rewards, kind)
    assert np.isfinite(advantages_G).all()
    np.testing.assert_allclose(advantages_G, naive(rewards, kind), rtol=1e-5, atol=1e-6)
    if kind == "mean_std" and rewards:
        assert np.abs(advantages_G).max() < max(len(rewards), 1) ** 0.5


@given(rewards_lists, st.sampled_from(KINDS), st.randoms())
def test_advantages_follow_their_episodes_when_the_group_is_permuted(rewards, kind, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    permuted = group_advantages([rewards[i] for i in order], kind)
    np.testing.assert_allclose(permuted, group_advantages(rewards, kind)[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rewards", [[1.0, float("nan")], [float("inf"), 0.0], [1.7e308, 1.7e308, -1.7e308]])
@pytest.mark.parametrize("kind", KINDS)
def test_rewards_that_cannot_be_compared_are_refused(rewards, kind):
    with pytest.raises(RewardNotFiniteError):
        group_advantages(rewards, kind)
