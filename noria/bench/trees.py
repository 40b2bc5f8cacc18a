"""Batches to measure on: random ids in the shapes that reinforcement learning has, as token trees with and without sharing.

group       one prompt of P ids, G answers of R tokens
tool_prompt one prompt shared by several groups, each with its own task
agent       turns of an agent that branch: every turn doubles the paths
"""

from dataclasses import replace

import numpy as np

from noria.config import AlgorithmConfig
from noria.rl.tree import build_tree
from noria.types import Completion, Episode, EpisodeGroup, Ids, Task, TokenTree, Turn

BEHAVIOR_LOGPROB = -90.0
"""Of every sampled token: below what a model gives to random ids (SmolLM2 cut to 16 layers goes down to -74), so that every importance weight is the
cap and no token is all the gradient."""


def group(vocab_size: int, *, prompt: int, answer: int, members: int, seed: int = 0) -> TokenTree:
    """One group: a prompt of `prompt` ids, `members` answers of `answer` tokens."""
    rng = np.random.default_rng(seed)
    return tree_of([_group(rng, vocab_size, _ids(rng, vocab_size, prompt), answer=answer, members=members, index=0)])


def tool_prompt(vocab_size: int, *, prompt: int, task: int, answer: int, groups: int, members: int, seed: int = 0) -> TokenTree:
    """`groups` groups whose prompts begin with the same `prompt` ids (tool schemas, say) and go on with `task` ids of their own."""
    rng = np.random.default_rng(seed)
    shared = _ids(rng, vocab_size, prompt)
    return tree_of(
        [_group(rng, vocab_size, shared + _ids(rng, vocab_size, task), answer=answer, members=members, index=index) for index in range(groups)]
    )


def agent(vocab_size: int, *, prompt: int, observation: int, answer: int, turns: int, branches: int, seed: int = 0) -> TokenTree:
    """`branches` paths of `turns` turns that part two by two, the last halvings at the last turns: with 4 turns and 8 branches there are 1, 2, 4 and
    8 ways to have had turns 1 to 4. Every path is an episode with tokens of its own to train on all its turns, shared positions or not."""
    rng = np.random.default_rng(seed)
    start, made = _ids(rng, vocab_size, prompt), dict[tuple[int, int], tuple[Ids, Ids]]()

    def turn(number: int, branch: int) -> Turn:
        ways = max(1, branches >> (turns - 1 - number))
        key = (number, branch * ways // branches)
        if key not in made:
            made[key] = (start if number == 0 else _ids(rng, vocab_size, observation), _ids(rng, vocab_size, answer))
        return _turn(*made[key])

    episodes = tuple(Episode(f"0.{b}", b, tuple(turn(t, b) for t in range(turns)), float(b % 2)) for b in range(branches))
    return tree_of([EpisodeGroup("0", "bench", Task(0, 0), episodes)])


def tree_of(groups: list[EpisodeGroup]) -> TokenTree:
    """The tree of a batch of these groups."""
    algorithm = AlgorithmConfig(steps=1, group_size=max(2, len(groups[0].episodes)), groups_per_batch=len(groups))
    return build_tree(groups, algorithm)[0]


def unshared(tree: TokenTree) -> TokenTree:
    """The same sequences with the same entries, each laid out alone from its first id on: nothing is shared, and nothing else differs."""
    entries = tree.entries
    first_Q = np.flatnonzero(np.diff(entries.sequence_M, prepend=-1))
    last_Q = np.maximum.reduceat(entries.predict_from_M, first_Q)
    index_T = np.arange(len(tree))
    paths = [np.flatnonzero((index_T <= last) & (last < tree.end_T)) for last in last_Q]
    lengths = np.array([len(path) for path in paths])
    stop_Q = np.cumsum(lengths)
    old_T = np.concatenate(paths)
    start_M = np.repeat(stop_Q - lengths, np.diff(first_Q, append=len(entries)))
    moved = (tree.depth_T[entries.predict_from_M] + start_M).astype(np.int32)
    return replace(
        tree,
        ids_T=tree.ids_T[old_T],
        depth_T=tree.depth_T[old_T],
        end_T=np.repeat(stop_Q, lengths).astype(np.int32),
        node_start_N=(stop_Q - lengths).astype(np.int32),
        node_stop_N=stop_Q.astype(np.int32),
        node_parent_N=np.full(len(paths), -1, np.int32),
        entries=replace(entries, predict_from_M=moved),
    )


def sequences(vocab_size: int, *, lengths: list[int], entries_each: int, seed: int = 0) -> TokenTree:
    """Unrelated sequences, an entry for each of the last `entries_each` positions, or for all: what packed training without branches sees."""
    rng = np.random.default_rng(seed)
    counts = [min(entries_each, length) for length in lengths]
    groups = [
        _group(rng, vocab_size, _ids(rng, vocab_size, length + 1 - count), answer=count, members=1, index=index)
        for index, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    algorithm = AlgorithmConfig(steps=1, group_size=2, groups_per_batch=len(groups), zero_signal="train")
    tree, _ = build_tree(groups, algorithm)
    ones = np.ones(len(tree.entries), np.float32)
    return replace(tree, entries=replace(tree.entries, advantage_M=ones))


def _group(rng: np.random.Generator, vocab_size: int, observation: Ids, *, answer: int, members: int, index: int) -> EpisodeGroup:
    episodes = tuple(
        Episode(f"{index}.{member}", member, (_turn(observation, _ids(rng, vocab_size, answer)),), float(member % 2)) for member in range(members)
    )
    return EpisodeGroup(str(index), "bench", Task(index, 0), episodes)


def _turn(observation: Ids, sampled: Ids) -> Turn:
    return Turn(observation, Completion(sampled, (BEHAVIOR_LOGPROB,) * len(sampled), (0,) * len(sampled), "stop"), 1.0)


def _ids(rng: np.random.Generator, vocab_size: int, count: int) -> Ids:
    return tuple(int(i) for i in rng.integers(0, vocab_size, count))
