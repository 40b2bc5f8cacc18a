"""A run's batch as one token tree: masks, weights and positions of everything its optimizer step trains.

    groups ──credit (rl/credit.py)──▶ candidates ──weights──▶ rows ──prune──▶ trie ──depth first──▶ TokenTree

Positions are shared by all episodes of the batch whose ids agree, whatever their group; entries never are. An episode that forked has a row for each
of its paths: a token is an entry of the path on which it was sampled, once, whatever later paths keep of it. The work is done on whole runs of ids:
rows are sorted as bytes, neighbours are compared as arrays, and Python steps once per node.

Shape letters: T position, M entry, N node, Q sequence = row (one path of one trained episode), E episode of the batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import numpy as np

from noria.config import AlgorithmConfig
from noria.errors import InvalidRequestError
from noria.rl.credit import (
    Candidate,
    TokenScores,
    candidates_of,
    episode_advantages,
    needs_values,
    scored_episodes,
    token_weights,
)
from noria.types import Entries, Episode, EpisodeGroup, FloatArray, Ids, IntArray, TokenTree, Turn


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What a batch was made of: plain numbers, for metrics.

    num_groups, num_groups_without_signal (all rewards equal; with a critic none); num_episodes, of which num_truncated were cut, num_empty have no
    sampled token and num_trained have entries; num_failed: episodes that failed for good and are not in num_episodes. num_entries: trained tokens.
    num_positions: of the tree; num_positions_unshared: of the same paths laid out one by one. reward_mean, reward_std: of the raw rewards, over all
    episodes.
    completion_length_mean: sampled tokens per episode. reward_parts: mean of each named component over the episodes that reported it. Means of
    nothing are 0.
    """

    num_groups: int
    num_groups_without_signal: int
    num_episodes: int
    num_truncated: int
    num_empty: int
    num_failed: int
    num_trained: int
    num_entries: int
    num_positions: int
    num_positions_unshared: int
    reward_mean: float
    reward_std: float
    completion_length_mean: float
    reward_parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One trained sequence as arrays, at least one entry. path_T: ids up to its last predictor. predictor_depth_M: index in path_T that predicts each
    target, ascending. episode: its index among all episodes of the batch; columns: further inputs of the loss, the same in every row of a batch
    (`learner.batches.COLUMNS`); the other fields as in `Entries`.
    """

    episode: int
    path_T: IntArray
    predictor_depth_M: IntArray
    target_M: IntArray
    temperature_M: FloatArray
    behavior_logprobs_M: FloatArray
    advantage_M: FloatArray
    weight_M: FloatArray
    version_M: IntArray
    columns: Mapping[str, FloatArray | IntArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchTree:
    """What one optimizer step trains. columns: further inputs of the loss by entry, [M] (`learner.batches.COLUMNS`)."""

    tree: TokenTree
    columns: Mapping[str, FloatArray | IntArray]
    statistics: BatchStatistics


@dataclass(frozen=True, slots=True)
class _Layout:
    """The positions of a tree, and for each row the positions that predict its targets."""

    ids_T: IntArray
    depth_T: IntArray
    end_T: IntArray
    node_start_N: IntArray
    node_stop_N: IntArray
    node_parent_N: IntArray
    predict_from_Q: list[IntArray]


def build_batch(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig, scores: TokenScores | None = None) -> BatchTree:
    """The token tree of one optimizer step, what its loss reads beside it, and the batch's statistics.

    groups: the whole batch, in the order in which it was formed; episodes are taken by member. scores: of the entries of `scoring_tree`, if there is
    one. What is trained, with which weight:
        advantages    from the raw rewards of all episodes of a group (`penalize` gives a truncated one reward 0 first; `kl = "reward"` adds the
                      penalty); with a critic, per token, from its values; in pairs, 1 of the chosen and -1 of the rejected
        not trained   tokens sampled at temperature 0, or with top-k or top-p; truncated episodes under `truncated = "mask"`; unless `zero_signal =
                      "train"`, groups of which nothing is left to learn from (`credit.has_signal`): they change nothing of the tree
        weight_M      1 / denominator, which counts what is left: "tokens" 1 / the number of tokens; "episodes" and "groups" give each episode or
                      group the same total weight, spread evenly over its tokens, all together 1; "none" 1. In pairs, that of the pair on each of
                      its tokens: "tokens" 1 / the number of pairs; "groups" the same total weight for each group; "none" 1
        pruned        unless "train", episodes whose own advantage is 0 although their group has signal: they count in the denominator (so that an
                      advantage of 0 and one of 1e-9 mean the same) but are not laid out; with a critic none, since its values train
    Children stand in order of first appearance, entries by episode, then pair, path, position; each path is a sequence of its own, in each of its
    episode's pairs. A path ends at the position that predicts its last trained token; one without any is left out. If nothing is left to train, the
    tree is empty.

    Raises InvalidRequestError: a sampled token that nothing precedes. RewardNotFiniteError: see `group_advantages`.
    """
    num_without_signal = 0 if needs_values(algorithm) else sum(not episode_advantages(group, algorithm).any() for group in groups)
    candidates = candidates_of(groups, algorithm, scores)
    weights = token_weights(candidates, algorithm.denominator)
    keeps_all = algorithm.zero_signal == "train" or needs_values(algorithm)
    kept = [(c, w) for c, w in zip(candidates, weights, strict=True) if keeps_all or c.advantage_M.any()]
    rows = [row for candidate, weight in kept for row in _rows(candidate, weight)]
    tree = tree_of(rows, num_episodes=sum(len(g.episodes) for g in groups))
    columns = {name: np.concatenate([row.columns[name] for row in rows]) for name in (rows[0].columns if rows else ())}
    return BatchTree(tree, columns, _statistics(groups, tree, num_without_signal, num_unshared=sum(len(r.path_T) for r in rows)))


def build_tree(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig) -> tuple[TokenTree, BatchStatistics]:
    """`build_batch` for losses that need neither scores nor columns. Raises as it does."""
    batch = build_batch(groups, algorithm)
    assert not batch.columns, f"loss {algorithm.loss} reads {', '.join(batch.columns)} too: build_batch"
    return batch.tree, batch.statistics


def scoring_tree(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig) -> TokenTree | None:
    """What the learner must score before the batch's advantages are known: an entry for each trainable token of `credit.scored_episodes`, in order.

    None if the algorithm needs no scores of these groups. Raises InvalidRequestError: a sampled token that nothing precedes. RewardNotFiniteError.
    """
    scored = [Candidate(each, np.zeros(each.num_tokens, np.float32)) for each in scored_episodes(groups, algorithm)]
    rows = [row for candidate in scored for row in _rows(candidate, 1.0)]
    return tree_of(rows, num_episodes=sum(len(g.episodes) for g in groups)) if rows else None


def tree_of(rows: Sequence[Row], *, num_episodes: int) -> TokenTree:
    """The trie of the rows, with their entries in the order given. rows: of ascending `episode` < num_episodes."""
    layout = _lay_out([r.path_T for r in rows], [r.predictor_depth_M for r in rows])
    entries = Entries(
        predict_from_M=_concatenate(layout.predict_from_Q, np.int32),
        target_M=_concatenate([r.target_M for r in rows], np.int32),
        temperature_M=_concatenate([r.temperature_M for r in rows], np.float32),
        behavior_logprobs_M=_concatenate([r.behavior_logprobs_M for r in rows], np.float32),
        advantage_M=_concatenate([r.advantage_M for r in rows], np.float32),
        weight_M=_concatenate([r.weight_M for r in rows], np.float32),
        version_M=_concatenate([r.version_M for r in rows], np.int32),
        sequence_M=np.repeat(np.arange(len(rows), dtype=np.int32), [len(r.target_M) for r in rows]),
    )
    return TokenTree(
        ids_T=layout.ids_T,
        depth_T=layout.depth_T,
        end_T=layout.end_T,
        node_start_N=layout.node_start_N,
        node_stop_N=layout.node_stop_N,
        node_parent_N=layout.node_parent_N,
        entries=entries,
        episode_Q=np.array([r.episode for r in rows], np.int32),
        num_episodes=num_episodes,
    )


def trained_groups(groups: Sequence[EpisodeGroup], tree: TokenTree) -> frozenset[str]:
    """Ids of the groups that have an entry in their batch's tree. groups: as given to `build_tree`."""
    owner_E = np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups])
    return frozenset(groups[owner].group_id for owner in np.unique(owner_E[tree.episode_Q]))


def _rows(candidate: Candidate, weight: float) -> Iterator[Row]:
    """A row for each path of the episode on which tokens that train were sampled. weight: of each token."""
    path_T = np.empty(0, np.int32)
    num_before = 0
    for turns in _unforked(candidate.of.episode.turns):
        head_T = path_T[: turns[0].keep]
        path_T = np.concatenate([head_T, *(_array(ids, np.int32) for turn in turns for ids in _ids_of(turn))])
        if any(turn.is_trainable for turn in turns):
            row = _row(candidate, weight, path_T, turns, first=num_before, num_kept=len(head_T))
            num_before += len(row.target_M)
            yield row


def _row(candidate: Candidate, weight: float, path_T: IntArray, turns: Sequence[Turn], *, first: int, num_kept: int) -> Row:
    """The row of one path, which is num_kept ids and then these turns. first: the candidate's trainable tokens before it."""
    depths: list[IntArray] = []
    trained: list[Turn] = []
    length = num_kept
    for turn in turns:
        start = length + len(turn.observation_ids)
        length = start + len(turn.completion.sampled_ids)
        if turn.is_trainable:
            depths.append(np.arange(start - 1, length - 1, dtype=np.int32))
            trained.append(turn)
    depth_M = np.concatenate(depths)
    if depth_M[0] < 0:
        raise InvalidRequestError(
            f"episode {candidate.of.episode.episode_id} begins with a sampled token: nothing predicts it. Begin with at least one observation id"
        )
    own = slice(first, first + len(depth_M))
    return Row(
        episode=candidate.of.index,
        path_T=path_T[: depth_M[-1] + 1],
        predictor_depth_M=depth_M,
        target_M=path_T[depth_M + 1],
        temperature_M=np.repeat(np.array([t.temperature for t in trained], np.float32), [len(d) for d in depths]),
        behavior_logprobs_M=np.concatenate([_array(t.completion.behavior_logprobs, np.float32) for t in trained]),
        advantage_M=candidate.advantage_M[own],
        weight_M=np.full(len(depth_M), weight, np.float32),
        version_M=np.concatenate([_array(t.completion.versions, np.int32) for t in trained]),
        columns={name: column_M[own] for name, column_M in candidate.columns.items()},
    )


def _unforked(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """The turns of each path: those that extend the path whose first turn began the episode, or forked."""
    length, path = 0, list[Turn]()
    for turn in turns:
        if turn.keep is not None and turn.keep < length:
            yield path
            path, length = [], turn.keep
        path.append(turn)
        length += sum(map(len, _ids_of(turn)))
    if path:
        yield path


def _ids_of(turn: Turn) -> tuple[Ids, Ids]:
    return turn.observation_ids, turn.completion.sampled_ids


def _lay_out(paths_Q: Sequence[IntArray], predictor_depths_Q: Sequence[IntArray]) -> _Layout:
    """The trie of the paths in depth-first order, children by first appearance, unbranched stretches as one node."""
    stop_N, parent_N, node_of_row = _trie(paths_Q)
    first_row_N, children_N = _ordered_children(stop_N, parent_N, node_of_row)
    rows_at_N: list[list[int]] = [[] for _ in stop_N]
    for row, node in enumerate(node_of_row):
        rows_at_N[node].append(row)

    path = np.empty(max(stop_N), np.int32)  # position at each depth, on the way from the root to the node being laid out
    predict_from_Q: list[IntArray] = [path[:0]] * len(paths_Q)
    ids: list[IntArray] = []
    starts: list[int] = []
    stops: list[int] = []
    depths: list[int] = []
    parents: list[int] = []
    length = 0
    waiting = [(child, -1, 0) for child in reversed(children_N[0])]
    while waiting:
        node, parent, depth = waiting.pop()
        ending = list(rows_at_N[node])
        while len(children_N[node]) == 1:
            node = children_N[node][0]
            ending += rows_at_N[node]
        size = stop_N[node] - depth
        path[depth : stop_N[node]] = np.arange(length, length + size, dtype=np.int32)
        ids.append(paths_Q[first_row_N[node]][depth : stop_N[node]])
        for row in ending:
            predict_from_Q[row] = path[predictor_depths_Q[row]]
        waiting += [(child, len(starts), stop_N[node]) for child in reversed(children_N[node])]
        starts.append(length)
        depths.append(depth)
        parents.append(parent)
        length += size
        stops.append(length)

    ends = list(stops)
    for n in range(len(ends) - 1, -1, -1):
        if parents[n] >= 0:
            ends[parents[n]] = max(ends[parents[n]], ends[n])
    start_N, stop_of_N = np.array(starts, np.int32), np.array(stops, np.int32)
    size_N = stop_of_N - start_N
    return _Layout(
        ids_T=_concatenate(ids, np.int32),
        depth_T=np.arange(length, dtype=np.int32) - np.repeat(start_N - np.array(depths, np.int32), size_N),
        end_T=np.repeat(np.array(ends, np.int32), size_N),
        node_start_N=start_N,
        node_stop_N=stop_of_N,
        node_parent_N=np.array(parents, np.int32),
        predict_from_Q=predict_from_Q,
    )


def _trie(paths_Q: Sequence[IntArray]) -> tuple[list[int], list[int], list[int]]:
    """Depth at which each node stops, its parent (node 0 is a root above all roots), and the node in which each path ends.

    Sorted as bytes, paths with a common head stand together, and the heads that neighbours share are all the inner nodes: the suffix-tree
    construction from sorted suffixes (Kasai et al. 2001), on whole paths.
    """
    stop_N, parent_N, node_of_row = [0], [-1], [0] * len(paths_Q)
    on_path = [0]
    keys = [path.tobytes() for path in paths_Q]
    order = sorted(range(len(paths_Q)), key=keys.__getitem__)
    shared_with_previous = [0, *(_common_length(paths_Q[a], paths_Q[b]) for a, b in pairwise(order))]
    for row, shared in zip(order, shared_with_previous, strict=False):
        below = -1
        while stop_N[on_path[-1]] > shared:
            below = on_path.pop()
        if stop_N[on_path[-1]] < shared:
            stop_N.append(shared)
            parent_N.append(on_path[-1])
            on_path.append(len(stop_N) - 1)
            parent_N[below] = on_path[-1]
        if len(paths_Q[row]) > shared:
            stop_N.append(len(paths_Q[row]))
            parent_N.append(on_path[-1])
            on_path.append(len(stop_N) - 1)
        node_of_row[row] = on_path[-1]
    return stop_N, parent_N, node_of_row


def _ordered_children(stop_N: Sequence[int], parent_N: Sequence[int], node_of_row: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """First row that passes through each node, and each node's children in that order."""
    first_row_N = [len(node_of_row)] * len(stop_N)
    for row, node in enumerate(node_of_row):
        first_row_N[node] = min(first_row_N[node], row)
    below_root = range(1, len(stop_N))
    for node in sorted(below_root, key=lambda n: -stop_N[n]):
        first_row_N[parent_N[node]] = min(first_row_N[parent_N[node]], first_row_N[node])
    children_N: list[list[int]] = [[] for _ in stop_N]
    for node in sorted(below_root, key=first_row_N.__getitem__):
        children_N[parent_N[node]].append(node)
    return first_row_N, children_N


def _common_length(a_T: IntArray, b_T: IntArray) -> int:
    """Number of leading ids that two paths share."""
    length = min(len(a_T), len(b_T))
    differs = a_T[:length] != b_T[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _statistics(groups: Sequence[EpisodeGroup], tree: TokenTree, num_without_signal: int, *, num_unshared: int) -> BatchStatistics:
    episodes = [e for g in groups for e in g.episodes]
    rewards = np.array([e.reward for e in episodes] or [0.0], np.float64)
    lengths = [e.num_sampled for e in episodes]
    return BatchStatistics(
        num_groups=len(groups),
        num_groups_without_signal=num_without_signal,
        num_episodes=len(episodes),
        num_truncated=sum(e.truncated for e in episodes),
        num_empty=lengths.count(0),
        num_failed=sum(g.num_failed for g in groups),
        num_trained=len(np.unique(tree.episode_Q)),
        num_entries=len(tree.entries),
        num_positions=len(tree),
        num_positions_unshared=num_unshared,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        completion_length_mean=sum(lengths) / len(lengths) if lengths else 0.0,
        reward_parts=_mean_parts(episodes),
    )


def _mean_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, part in episode.reward_parts:
            values.setdefault(name, []).append(part)
    return {name: fmean(parts) for name, parts in sorted(values.items())}


def _array(values: Sequence[float], dtype: type[np.generic]) -> np.ndarray:
    return np.fromiter(values, dtype, len(values))


def _concatenate(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
