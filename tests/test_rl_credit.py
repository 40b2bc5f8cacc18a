"""Credit against its naive reading, episode by episode and token by token: a critic's, a penalty in the reward's, that of pairs."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_batches import algorithm, batches, episode, group, trained_rows, turn

from noria.rl.advantages import group_advantages
from noria.rl.credit import TokenScores, has_signal, trained_members
from noria.rl.tree import build_batch, scoring_tree

TRUNCATED = st.sampled_from(["mask", "penalize", "keep"])


def tokens_of(played):
    """(sampled id, behavior_logprob) of what was sampled at a temperature, in order."""
    return [
        pair
        for made in played.turns
        if made.temperature > 0
        for pair in zip(made.completion.sampled_ids, made.completion.behavior_logprobs, strict=True)
    ]


def reward_of(played, rules):
    return 0.0 if played.truncated and rules.truncated == "penalize" else played.reward


def is_masked(played, rules):
    return played.truncated and rules.truncated == "mask"


def members_of(groups):
    """(index in the batch, its group, episode)."""
    ordered = [(owner, played) for owner in groups for played in sorted(owner.episodes, key=lambda e: e.member)]
    return [(index, owner, played) for index, (owner, played) in enumerate(ordered)]


def naive_gae(values, rewards, *, gae_lambda, gamma):
    advantages, following, after = [], 0.0, 0.0
    for value, reward in reversed(list(zip(values, rewards, strict=True))):
        after = reward + gamma * following - value + gamma * gae_lambda * after
        advantages.insert(0, after)
        following = value
    return advantages


def rewards_at_the_end(played, rules, penalties):
    return [-p + (reward_of(played, rules) if last else 0.0) for p, last in zip(penalties, [*[False] * (len(penalties) - 1), True], strict=True)]


@given(batches(), TRUNCATED, st.booleans(), st.integers(0, 2**31))
def test_a_critic_gives_each_token_the_advantage_of_its_episode_alone(groups, truncated, has_penalty, seed):
    rules = algorithm(
        loss="ppo_critic", truncated=truncated, gae_lambda=0.9, gae_gamma=0.8, **({"kl": "reward", "kl_coeff": 0.3} if has_penalty else {})
    )
    trained = [(index, played) for index, _, played in members_of(groups) if tokens_of(played) and not is_masked(played, rules)]
    tree = scoring_tree(groups, rules)
    assert (tree is None) == (not trained)
    if tree is None:
        assert not len(build_batch(groups, rules).tree.entries)
        return
    assert tree.entries.target_M.tolist() == [token for _, played in trained for token, _ in tokens_of(played)]
    rng = np.random.default_rng(seed)
    values_M, reference_M = rng.normal(size=(2, len(tree.entries))).astype(np.float32)
    made = build_batch(groups, rules, TokenScores(values_M, reference_M if has_penalty else None))

    first, advantages, returns = 0, [], []
    for _, played in trained:
        behavior = np.array([logprob for _, logprob in tokens_of(played)])
        own = slice(first, first + len(behavior))
        penalties = 0.3 * (behavior - reference_M[own]) if has_penalty else np.zeros(len(behavior))
        found = naive_gae(values_M[own].tolist(), rewards_at_the_end(played, rules, penalties), gae_lambda=0.9, gamma=0.8)
        advantages += found
        returns += [a + v for a, v in zip(found, values_M[own].tolist(), strict=True)]
        first = own.stop
    np.testing.assert_allclose(made.tree.entries.advantage_M, advantages, atol=1e-5)
    np.testing.assert_allclose(made.columns["returns_M"], returns, atol=1e-5)
    np.testing.assert_array_equal(made.columns["behavior_values_M"], values_M)
    same = [row[:5] for row in trained_rows(tree.ids_T, tree.end_T, tree.entries)]  # what was scored is what trains
    assert [row[:5] for row in trained_rows(made.tree.ids_T, made.tree.end_T, made.tree.entries)] == same


@given(batches(), TRUNCATED, st.sampled_from(["skip", "train"]), st.integers(0, 2**31))
def test_a_penalty_in_the_reward_moves_the_baseline_of_the_whole_group(groups, truncated, zero_signal, seed):
    rules = algorithm(truncated=truncated, zero_signal=zero_signal, kl="reward", kl_coeff=0.3, advantage="mean")
    learns = {owner.group_id: zero_signal == "train" or has_signal(owner, rules) for owner in groups}
    scored = [(index, played) for index, owner, played in members_of(groups) if tokens_of(played) and learns[owner.group_id]]
    tree = scoring_tree(groups, rules)
    assert (tree is None) == (not scored)
    if tree is None:
        return
    assert tree.entries.target_M.tolist() == [token for _, played in scored for token, _ in tokens_of(played)]
    reference_M = np.random.default_rng(seed).normal(size=len(tree.entries)).astype(np.float32)
    entries = build_batch(groups, rules, TokenScores(None, reference_M)).tree.entries

    sums, first = {}, 0
    for index, played in scored:
        behavior = np.array([logprob for _, logprob in tokens_of(played)])
        sums[index] = 0.3 * float((behavior - reference_M[first : first + len(behavior)]).sum())
        first += len(behavior)
    expected = []
    for owner in groups:
        own = [(index, played) for index, of, played in members_of(groups) if of is owner]
        rewards = [reward_of(played, rules) - sums.get(index, 0.0) for index, played in own]
        for (_, played), advantage in zip(own, group_advantages(rewards, "mean").tolist(), strict=True):
            if learns[owner.group_id] and not is_masked(played, rules) and (advantage != 0 or zero_signal == "train"):
                expected += [advantage] * len(tokens_of(played))
    np.testing.assert_allclose(entries.advantage_M, expected, atol=1e-5)


@given(batches(), TRUNCATED, st.sampled_from(["best_worst", "all"]), st.sampled_from(["tokens", "groups", "none"]))
def test_pairs_are_of_one_group_and_each_has_entries_of_its_own(groups, truncated, rule, denominator):
    rules = algorithm(loss="dpo", truncated=truncated, pairs=rule, denominator=denominator)
    assert scoring_tree(groups, rules) is None
    made = build_batch(groups, rules)
    entries, sides = made.tree.entries, {}
    pair_M = made.columns.get("pair_M", np.zeros(0, np.int32))
    owner_M = made.tree.episode_Q[entries.sequence_M]
    for m in range(len(entries)):
        sides.setdefault((int(pair_M[m]), float(entries.advantage_M[m])), []).append((int(owner_M[m]), int(entries.target_M[m])))
    played_of = {index: (owner, played) for index, owner, played in members_of(groups)}
    pairs, weight_of = [], dict(zip(pair_M.tolist(), entries.weight_M.tolist(), strict=True))
    for number in range(len(sides) // 2):
        found = []
        for sign in (1.0, -1.0):
            (index,) = {owner for owner, _ in sides[number, sign]}
            owner, played = played_of[index]
            assert [token for _, token in sides[number, sign]] == [token for token, _ in tokens_of(played)]
            found.append((owner.group_id, played))
        assert found[0][0] == found[1][0]
        assert reward_of(found[0][1], rules) > reward_of(found[1][1], rules)
        pairs.append((found[0][0], found[0][1].episode_id, found[1][1].episode_id))
    assert len(set(pairs)) == len(pairs)

    num_pairs_of = {}
    for owner in groups:
        kept = [played for _, of, played in members_of(groups) if of is owner and tokens_of(played) and not is_masked(played, rules)]
        ordered = [(a, b) for a, b in product(kept, kept) if reward_of(a, rules) > reward_of(b, rules)]
        num_pairs_of[owner.group_id] = min(len(ordered), 1) if rule == "best_worst" else len(ordered)
        assert has_signal(owner, rules) == bool(ordered)
        trains = {played.member for pair in ordered for played in pair} if rule == "all" else trained_members(owner, rules)
        assert trained_members(owner, rules) == trains
    assert {name: sum(name == pair[0] for pair in pairs) for name in num_pairs_of} == num_pairs_of
    num_groups = sum(map(bool, num_pairs_of.values()))
    for number, (name, *_) in enumerate(pairs):
        expected = {"tokens": 1 / len(pairs), "groups": 1 / (max(num_groups, 1) * max(num_pairs_of[name], 1)), "none": 1.0}[denominator]
        assert weight_of[number] == pytest.approx(expected)


def test_equal_rewards_teach_nothing_but_a_critic():
    equal = group(episode(0, turn((1,), (2, 3)), reward=1.0), episode(1, turn((1,), (4,)), reward=1.0))
    assert not has_signal(equal, algorithm())
    assert not has_signal(equal, algorithm(loss="dpo"))
    assert not has_signal(equal, algorithm(kl="reward", kl_coeff=0.1))
    assert has_signal(equal, algorithm(loss="ppo_critic"))
    assert trained_members(equal, algorithm(loss="ppo_critic")) == {0, 1}
