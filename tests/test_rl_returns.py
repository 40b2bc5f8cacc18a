"""Generalized advantage estimation over the turns of an episode, against its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_reference import naive_gae

from noria.errors import RewardNotFiniteError
from noria.rl.returns import gae, token_rewards

numbers = st.floats(-2, 2, width=32)
turns = st.lists(st.tuples(st.lists(numbers, max_size=40), numbers), max_size=5)
unit = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@settings(max_examples=150, deadline=None)
@given(turns, unit, unit, st.sampled_from([0.0, 0.7]))
def test_advantages_and_returns_are_those_of_the_definition(episode, gae_lambda, gamma, last_value):
    values = np.array([v for turn, _ in episode for v in turn], np.float32)
    rewards = token_rewards([len(turn) for turn, _ in episode], [reward for _, reward in episode])
    got = gae(values, rewards, gae_lambda=gae_lambda, gamma=gamma, last_value=last_value)
    want = naive_gae(episode, gae_lambda=gae_lambda, gamma=gamma, last_value=last_value)
    for mine, naive in zip(got, want, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, np.array(naive), rtol=1e-5, atol=1e-5)


def test_a_reward_belongs_to_the_last_token_sampled_before_it():
    assert token_rewards([2, 0, 1, 0], [1.0, 10.0, 3.0, 20.0]).tolist() == [0.0, 11.0, 23.0]
    assert token_rewards([0, 1], [5.0, 1.0]).tolist() == [1.0], "nothing was sampled that the first could reward"
    assert token_rewards([], []).tolist() == []


def test_with_lambda_and_gamma_one_the_return_is_the_sum_of_what_is_to_come():
    rewards = token_rewards([3, 100], [1.0, 2.0])
    advantages, returns = gae(np.linspace(-1, 1, 103), rewards, gae_lambda=1.0)
    np.testing.assert_allclose(returns, [3.0] * 3 + [2.0] * 100, atol=1e-6)
    np.testing.assert_allclose(advantages, returns - np.linspace(-1, 1, 103), atol=1e-6)


def test_a_perfect_critic_leaves_no_advantage():
    values = np.full(200, 0.5)
    advantages, returns = gae(values, token_rewards([200], [0.5]))
    assert np.abs(advantages).max() == 0.0
    assert returns.tolist() == [0.5] * 200


def test_a_very_long_episode_is_finite_and_exact():
    advantages, _ = gae(np.zeros(30_000), token_rewards([30_000], [1.0]))
    np.testing.assert_allclose(advantages[-5:], 0.95 ** np.arange(4, -1, -1.0), rtol=1e-6)
    assert np.isfinite(advantages).all()


def test_a_value_that_is_nan_surfaces_and_a_reward_is_refused():
    assert np.isnan(gae([0.0, np.nan, 0.0], np.zeros(3))[0][:2]).all()
    with pytest.raises(RewardNotFiniteError, match="not all finite"):
        token_rewards([1], [np.nan])
