"""The token tree: the mask rule against brute force, sharing of positions, entries, masks and denominators."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batches import Trained, algorithm, batches, episode, forked_batch, group, trained_rows, turn

from noria.errors import InvalidRequestError
from noria.rl.advantages import group_advantages
from noria.rl.credit import has_signal
from noria.rl.tree import build_tree, trained_groups
from noria.types import EpisodeGroup, SamplingParams

POLICIES = st.fixed_dictionaries(
    {
        "truncated": st.sampled_from(["mask", "penalize", "keep"]),
        "zero_signal": st.sampled_from(["skip", "train", "resample"]),
        "denominator": st.sampled_from(["tokens", "episodes", "groups", "none"]),
        "advantage": st.sampled_from(["mean", "mean_std", "leave_one_out"]),
    }
)
DENOMINATORS = ["tokens", "episodes", "groups", "none"]


def naive_rows(groups: list[EpisodeGroup], policies: dict[str, str]) -> list[Trained]:
    """Every trained token of the batch, token by token, straight from the words of design sections 5 and 7, one path at a time."""
    counted: list[tuple[int, float, list[Trained]]] = []
    sequence = 0
    is_skipping = policies["zero_signal"] != "train"
    for number, g in enumerate(groups):
        episodes = sorted(g.episodes, key=lambda e: e.member)
        rewards = [0.0 if e.truncated and policies["truncated"] == "penalize" else e.reward for e in episodes]
        advantages = group_advantages(rewards, policies["advantage"]).tolist()
        for e, advantage in zip(episodes, advantages, strict=True):
            context: tuple[int, ...] = ()
            rows: list[Trained] = []
            for t in e.turns:
                if t.keep is not None and t.keep < len(context):
                    sequence += 1
                    context = context[: t.keep]
                context += t.observation_ids
                c = t.completion
                for token, logprob, version in zip(c.sampled_ids, c.behavior_logprobs, c.versions, strict=True):
                    if t.temperature > 0:
                        rows.append((sequence, context, token, t.temperature, logprob, advantage, 0.0, version))
                    context += (token,)
            is_masked = e.truncated and policies["truncated"] == "mask"
            if rows and not is_masked:
                counted.append((number, advantage, rows))
            sequence += 1
    with_signal = {number for number, advantage, _ in counted if advantage}
    counted = [c for c in counted if c[0] in with_signal or not is_skipping]
    weighted: list[Trained] = []
    for number, advantage, rows in counted:
        peers = [r for other, _, r in counted if other == number]
        weight = {
            "tokens": 1 / sum(len(r) for *_, r in counted),
            "episodes": 1 / len(counted) / len(rows),
            "groups": 1 / len({n for n, *_ in counted}) / sum(map(len, peers)),
            "none": 1.0,
        }[policies["denominator"]]
        if advantage or not is_skipping:
            weighted += [(*row[:6], weight, row[7]) for row in rows]
    numbers = {old: new for new, old in enumerate(dict.fromkeys(row[0] for row in weighted))}
    return [(numbers[row[0]], *row[1:]) for row in weighted]


def assert_same_rows(rows: list[Trained], expected: list[Trained]) -> None:
    assert [(r[:3], r[7]) for r in rows] == [(r[:3], r[7]) for r in expected]
    np.testing.assert_allclose([r[3:7] for r in rows], [r[3:7] for r in expected], rtol=1e-6)


@settings(max_examples=300)
@given(batches(), POLICIES)
def test_every_entry_sees_exactly_the_ids_before_its_target(groups, policies):
    tree, statistics = build_tree(groups, algorithm(**policies))
    expected = naive_rows(groups, policies)
    assert_same_rows(trained_rows(tree.ids_T, tree.end_T, tree.entries), expected)
    assert statistics.num_entries == len(tree.entries) == len(expected)
    assert tree.episode_Q.tolist() == sorted(tree.episode_Q.tolist())
    assert len(tree.episode_Q) == len({r[0] for r in expected})
    assert statistics.num_trained == len(set(tree.episode_Q.tolist()))
    assert tree.num_episodes == statistics.num_episodes == sum(len(g.episodes) for g in groups)


@settings(max_examples=300)
@given(batches(), POLICIES)
def test_the_layout_is_the_trie_of_the_contexts_depth_first(groups, policies):
    tree, statistics = build_tree(groups, algorithm(**policies))
    contexts = [r[1] for r in naive_rows(groups, policies)]
    order: dict[tuple[int, ...], None] = {}
    for context in contexts:
        for stop in range(1, len(context) + 1):
            order.setdefault(context[:stop])
    prefixes = list(order)  # in order of first appearance, each after its own prefixes

    def depth_first(above: tuple[int, ...]) -> list[tuple[int, ...]]:
        children = [p for p in prefixes if len(p) == len(above) + 1 and p[:-1] == above]
        return [q for child in children for q in (child, *depth_first(child))]

    laid_out = depth_first(())
    assert [p[-1] for p in laid_out] == tree.ids_T.tolist()
    assert [len(p) - 1 for p in laid_out] == tree.depth_T.tolist()
    assert [sum(q[: len(p)] == p for q in laid_out) + i for i, p in enumerate(laid_out)] == tree.end_T.tolist()
    assert statistics.num_positions == len(tree) == len(laid_out)
    longest = {r[0]: len(r[1]) for r in naive_rows(groups, policies)}
    assert statistics.num_positions_unshared == sum(longest.values())


@settings(max_examples=200)
@given(batches(), POLICIES)
def test_nodes_are_maximal_unbranched_stretches_of_the_layout(groups, policies):
    tree, _ = build_tree(groups, algorithm(**policies))
    assert tree.node_start_N.tolist() == [0, *tree.node_stop_N.tolist()][: len(tree.node_start_N)]
    assert (tree.node_stop_N[-1:] == len(tree)).all()
    children = [tree.node_parent_N.tolist().count(n) for n in range(len(tree.node_parent_N))]
    assert 1 not in children
    for n, (start, stop, parent) in enumerate(zip(tree.node_start_N, tree.node_stop_N, tree.node_parent_N, strict=True)):
        assert start < stop
        assert parent < n
        assert tree.depth_T[start] == (tree.depth_T[tree.node_stop_N[parent] - 1] + 1 if parent >= 0 else 0)
        assert (np.diff(tree.depth_T[start:stop]) == 1).all()
        assert len(set(tree.end_T[start:stop].tolist())) == 1


def test_arrays_have_the_types_of_the_contract():
    for groups in ([], forked_batch()):
        tree, _ = build_tree(groups, algorithm())
        ints = [tree.ids_T, tree.depth_T, tree.end_T, tree.node_start_N, tree.node_stop_N, tree.node_parent_N]
        ints += [tree.entries.predict_from_M, tree.entries.target_M, tree.entries.version_M, tree.entries.sequence_M, tree.episode_Q]
        e = tree.entries
        floats = [e.temperature_M, e.behavior_logprobs_M, e.advantage_M, e.weight_M]
        assert {a.dtype for a in ints} == {np.dtype(np.int32)}
        assert {a.dtype for a in floats} == {np.dtype(np.float32)}


def test_equal_tokens_share_a_position_and_never_an_entry():
    same = turn((5, 6), (7, 8))
    tree, _ = build_tree([group(episode(0, same, reward=1.0), episode(1, same), episode(2, turn((5, 6), (7, 9))))], algorithm(advantage="mean"))
    assert tree.ids_T.tolist() == [5, 6, 7]
    assert tree.entries.predict_from_M.tolist() == [1, 2] * 3
    assert tree.entries.target_M.tolist() == [7, 8, 7, 8, 7, 9]
    assert tree.entries.sequence_M.tolist() == [0, 0, 1, 1, 2, 2]


def test_groups_share_their_common_header():
    tree, statistics = build_tree(forked_batch(4, 8, header=50, prompt=20, answer=1), algorithm())
    assert statistics.num_positions == 50 + 4 * 20
    assert tree.node_parent_N.tolist() == [-1, 0, 0, 0, 0]


def test_a_sampled_token_that_nothing_precedes_is_refused():
    bad = group(episode(0, turn((), (1, 2)), reward=1.0), episode(1, turn((3,), (1,))))
    with pytest.raises(InvalidRequestError, match="episode-0"):
        build_tree([bad], algorithm())


def test_an_empty_observation_after_the_first_turn_is_fine():
    tree, _ = build_tree([group(episode(0, turn((1,), (2,)), turn((), (3,)), reward=1.0), episode(1))], algorithm())
    assert trained_rows(tree.ids_T, tree.end_T, tree.entries)[1][1:3] == ((1, 2), 3)


def test_greedy_turns_are_read_and_never_trained():
    tree, _ = build_tree([group(episode(0, turn((), (1, 2), temperature=0.0), turn((3,), (4,)), reward=1.0), episode(1))], algorithm())
    assert [r[1:3] for r in trained_rows(tree.ids_T, tree.end_T, tree.entries)] == [((1, 2, 3), 4)]


@pytest.mark.parametrize("constraint", [{"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_turns_that_were_not_drawn_from_the_whole_policy_are_read_and_never_trained(constraint):
    """Case 21: the mass that top-k or top-p leaves out must not become part of a ratio."""
    params = SamplingParams(**({"max_tokens": 2} | constraint))
    drawn = turn((), (1, 2))
    constrained = replace(drawn, completion=replace(drawn.completion, is_trainable=params.is_trainable))
    tree, _ = build_tree([group(episode(0, constrained, turn((3,), (4,)), reward=1.0), episode(1, constrained))], algorithm())
    assert [r[1:3] for r in trained_rows(tree.ids_T, tree.end_T, tree.entries)] == [((1, 2, 3), 4)]
    assert not build_tree([group(episode(0, constrained, reward=1.0), episode(1, constrained))], algorithm())[0].episode_Q.size


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("truncated", ["mask", "keep"])
def test_a_batch_with_nothing_to_train_is_an_empty_tree_and_never_nan(denominator, truncated):
    cut_off = group(episode(0, turn((1,), (2,)), reward=1.0, truncated=True), episode(1, turn((1,), (3,)), truncated=True))
    greedy = group(episode(0, turn((1,), (2,), temperature=0.0), reward=1.0), episode(1))
    for groups in ([], [greedy], [group()], [group(episode(0, turn((1,), (2,)), reward=1.0))], *([[cut_off]] if truncated == "mask" else [])):
        tree, statistics = build_tree(groups, algorithm(denominator=denominator, truncated=truncated))
        assert len(tree) == len(tree.entries) == len(tree.node_start_N) == statistics.num_trained == 0
        assert np.isfinite([statistics.reward_mean, statistics.reward_std, statistics.completion_length_mean]).all()


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_masked_episode_changes_no_weight_but_counts_in_the_group(denominator):
    kept = [episode(0, turn((1,), (2, 3)), reward=1.0), episode(1, turn((1,), (4,)), reward=0.0)]
    cut_off = episode(2, turn((1,), (5,) * 50), reward=0.0, truncated=True)
    settings_ = algorithm(denominator=denominator, advantage="mean")
    without, _ = build_tree([group(*kept)], settings_)
    masked, statistics = build_tree([group(*kept, cut_off)], settings_)
    assert masked.entries.weight_M.tolist() == without.entries.weight_M.tolist()
    np.testing.assert_allclose(masked.entries.advantage_M, [2 / 3, 2 / 3, -1 / 3], rtol=1e-6)
    assert statistics.num_truncated == 1
    assert statistics.reward_mean == pytest.approx(1 / 3)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_skipped_group_changes_nothing(denominator):
    signal, dull = forked_batch(1, seed=1), group(*(episode(m, turn((1,), (2,) * (m + 1)), reward=0.5) for m in range(4)))
    alone, _ = build_tree(signal, algorithm(denominator=denominator))
    beside, statistics = build_tree([*signal, dull], algorithm(denominator=denominator))
    assert beside.entries.weight_M.tolist() == alone.entries.weight_M.tolist()
    assert beside.ids_T.tolist() == alone.ids_T.tolist()
    assert (statistics.num_groups, statistics.num_groups_without_signal) == (2, 1)
    assert len(build_tree([dull], algorithm(zero_signal="train"))[0].entries) == 10


@pytest.mark.parametrize(("denominator", "share"), [("tokens", None), ("episodes", 1 / 4), ("groups", 1 / 2)])
def test_denominators_give_equal_shares_of_one(denominator, share):
    one = group(*(episode(m, turn((1,), (2,) * (m + 1)), reward=m) for m in range(3)))
    two = group(episode(0, turn((1,), (3,) * 9), reward=1.0), episode(1))
    entries = build_tree([one, two], algorithm(denominator=denominator, zero_signal="train"))[0].entries
    assert entries.weight_M.sum() == pytest.approx(1.0, rel=1e-6)
    last = entries.weight_M[entries.sequence_M == 3].sum()
    assert last == pytest.approx(share if share else 9 / 15, rel=1e-6)


def test_an_episode_split_into_turns_weighs_as_much_as_in_one_turn():
    whole = turn((1,), (2, 3, 4, 5))
    parts = (turn((1,), (2,)), turn((), (3, 4)), turn((), (5,)))
    other = episode(1, turn((1,), (9,)))
    for denominator in DENOMINATORS:
        one, _ = build_tree([group(episode(0, whole, reward=1.0), other)], algorithm(denominator=denominator))
        many, _ = build_tree([group(episode(0, *parts, reward=1.0), other)], algorithm(denominator=denominator))
        assert many.entries.weight_M.tolist() == one.entries.weight_M.tolist()
        assert many.entries.advantage_M.tolist() == one.entries.advantage_M.tolist()
        assert many.ids_T.tolist() == one.ids_T.tolist()


def test_a_forked_episode_trains_every_token_once_on_the_path_where_it_was_sampled():
    first, second = turn((1, 2), (3, 4, 5)), turn((6,), (7,), keep=3)
    forked = episode(0, first, second, turn((8,), (9,)), reward=1.0)
    tree, statistics = build_tree([group(forked, episode(1))], algorithm(advantage="mean"))
    rows = trained_rows(tree.ids_T, tree.end_T, tree.entries)
    assert [r[:3] for r in rows] == [(0, (1, 2), 3), (0, (1, 2, 3), 4), (0, (1, 2, 3, 4), 5), (1, (1, 2, 3, 6), 7), (1, (1, 2, 3, 6, 7, 8), 9)]
    assert tree.ids_T.tolist() == [1, 2, 3, 4, 6, 7, 8], "what both paths share is laid out once"
    assert (statistics.num_trained, statistics.num_entries, statistics.num_positions_unshared) == (1, 5, 4 + 6)
    assert forked.paths == ((1, 2, 3, 4, 5), (1, 2, 3, 6, 7, 8, 9))
    assert trained_groups([group(forked, episode(1))], tree) == {"group"}


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_rollout_in_several_paths_weighs_as_much_as_in_one(denominator):
    whole = episode(0, turn((1,), (2, 3, 4, 5, 6)), reward=1.0)
    forks = [turn((10 + k,), (2 + k,), keep=0 if k else None) for k in range(5)]
    split = episode(0, *forks, reward=1.0)
    others = [episode(1, turn((1,), (9,)), reward=0.25), episode(2, turn((1,), (8, 8)))]
    one, in_one = build_tree([group(whole, *others)], algorithm(denominator=denominator))
    five, in_five = build_tree([group(split, *others)], algorithm(denominator=denominator))
    assert five.episode_Q.tolist() == [0] * 5 + [1, 2]
    assert five.entries.weight_M.tolist() == one.entries.weight_M.tolist()
    assert five.entries.advantage_M.tolist() == one.entries.advantage_M.tolist()
    assert (in_five.num_trained, in_five.reward_mean, in_five.reward_std) == (in_one.num_trained, in_one.reward_mean, in_one.reward_std)


def test_a_path_without_trained_tokens_is_not_laid_out():
    greedy = episode(0, turn((1, 2), (3,), temperature=0.0), turn((4,), (5,), keep=1), reward=1.0)
    tree, _ = build_tree([group(greedy, episode(1))], algorithm())
    assert [r[:3] for r in trained_rows(tree.ids_T, tree.end_T, tree.entries)] == [(0, (1, 4), 5)]
    assert tree.ids_T.tolist() == [1, 4]


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_group_without_entries_changes_nothing(denominator):
    signal = forked_batch(1, seed=1)
    masked = [episode(m, turn((1,), (2,)), reward=2.0 * (m == 0), truncated=m != 1) for m in range(3)]
    middle = group(*masked[:1], episode(1, turn((1,), (2,) * 9), reward=1.0), *masked[2:], name="masked")
    assert group_advantages([2.0, 1.0, 0.0], "mean").tolist() == [1.0, 0.0, -1.0], "the only episode that is left has no advantage"
    alone, _ = build_tree(signal, algorithm(denominator=denominator, advantage="mean"))
    beside, _ = build_tree([*signal, middle], algorithm(denominator=denominator, advantage="mean"))
    assert beside.entries.weight_M.tolist() == alone.entries.weight_M.tolist()
    assert not has_signal(middle, algorithm(advantage="mean"))
    assert has_signal(signal[0], algorithm(advantage="mean"))


def test_reward_components_are_averaged_over_the_episodes_that_report_them():
    episodes = [episode(0, parts={"a": 1.0, "b": 2.0}), episode(1, parts={"a": 0.0}), episode(2)]
    assert build_tree([group(*episodes)], algorithm())[1].reward_parts == {"a": 0.5, "b": 2.0}
    assert build_tree([], algorithm())[1].reward_parts == {}


def test_a_pruned_episode_still_counts_in_the_denominator():
    members = [episode(m, turn((1,), (2 + m,)), reward=m / 2) for m in range(3)]
    tree, _ = build_tree([group(*members)], algorithm(advantage="mean"))
    assert tree.episode_Q[tree.entries.sequence_M].tolist() == [0, 2]
    np.testing.assert_allclose(tree.entries.weight_M, 1 / 3)


@pytest.mark.slow
def test_building_costs_little_more_than_turning_the_ids_into_arrays():
    groups = forked_batch(64, 8, header=200, prompt=800, answer=2000)

    def best_of_three(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    build_s = best_of_three(lambda: build_tree(groups, algorithm(zero_signal="train")))
    convert_s = best_of_three(lambda: [np.fromiter(e.ids, np.int32) for g in groups for e in g.episodes])
    assert build_s < 10 * convert_s, f"building takes {build_s / convert_s:.1f} times the conversion of the ids"


def test_lengths_count_what_was_sampled_and_the_loss_what_trains():
    """Case A9. Valid and trainable are two things: greedy tokens, observations and a masked episode are read, and never trained."""
    mixed = episode(0, turn((7, 8), (1, 2, 3), temperature=0.0), turn((9,), (4, 5)), reward=1.0)
    plain = episode(1, turn((7, 8), (6,)), reward=0.0)
    cut_off = episode(2, turn((7, 8), (1, 1, 1, 1)), reward=0.5, truncated=True)
    batch = [group(mixed, plain, cut_off)]
    for denominator, weights in (("tokens", [1 / 3] * 3), ("episodes", [1 / 4, 1 / 4, 1 / 2]), ("groups", [1 / 3] * 3), ("none", [1.0] * 3)):
        tree, statistics = build_tree(batch, algorithm(denominator=denominator, advantage="mean", truncated="mask"))
        assert tree.entries.target_M.tolist() == [4, 5, 6]
        np.testing.assert_allclose(tree.entries.weight_M, weights, rtol=1e-6)
        assert statistics.num_entries == 3
        assert statistics.completion_length_mean == pytest.approx((5 + 1 + 4) / 3)
        assert statistics.num_positions_unshared == 7 + 2, "paths up to their last predictor: all that is valid is read"
