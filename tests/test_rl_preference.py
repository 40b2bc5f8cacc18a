"""Pairs of a group by reward."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import RewardNotFiniteError
from noria.rl.preference import Pair, preference_pairs

rewards = st.lists(st.sampled_from([0.0, 0.25, 1.0, -3.0]), max_size=8)


@given(rewards)
def test_all_pairs_are_every_two_members_whose_rewards_differ(values):
    naive = [Pair(i, j) for i in range(len(values)) for j in range(len(values)) if values[i] > values[j]]
    assert preference_pairs(values, "all") == naive


@given(rewards)
def test_the_best_is_paired_with_the_worst_and_equals_with_nobody(values):
    pairs = preference_pairs(values, "best_worst")
    assert len(pairs) == (len(set(values)) > 1)
    for chosen, rejected in pairs:
        assert values[chosen] == max(values)
        assert values[rejected] == min(values)
        assert chosen == values.index(max(values))
        assert rejected == values.index(min(values))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", ["all", "best_worst"])
def test_a_reward_that_is_no_number_is_refused(bad, rule):
    with pytest.raises(RewardNotFiniteError, match="not all finite"):
        preference_pairs([0.0, bad], rule)
