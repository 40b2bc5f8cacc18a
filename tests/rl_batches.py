"""Builders of episodes, groups and batches, and the naive reading of a tree, for the tests of rl/."""

from itertools import count
from typing import Any

import numpy as np
from hypothesis import strategies as st

from noria.config import AlgorithmConfig
from noria.types import Completion, Entries, Episode, EpisodeGroup, IntArray, Task, Turn

Trained = tuple[int, tuple[int, ...], int, float, float, float, float, int]
"""One entry without positions: sequence, ids before the target, target, temperature, behavior_logprob, advantage, weight, version."""


def algorithm(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(steps=1, **settings)


def turn(observation: tuple[int, ...], sampled: tuple[int, ...], temperature: float = 1.0, version: int = 0, keep: int | None = None) -> Turn:
    """Behavior_logprobs tell the tokens of a turn apart."""
    logprobs = tuple(-0.5 - 0.01 * k - 0.1 * token for k, token in enumerate(sampled))
    return Turn(observation, Completion(sampled, logprobs, tuple(version + k % 2 for k in range(len(sampled))), "stop"), temperature, keep)


def episode(member: int, *turns: Turn, reward: float = 0.0, truncated: bool = False, parts: dict[str, float] | None = None) -> Episode:
    return Episode(f"episode-{member}", member, turns, reward, truncated, tuple((parts or {}).items()))


def group(*episodes: Episode, name: str = "group") -> EpisodeGroup:
    return EpisodeGroup(name, "run", Task(0, 0), episodes)


def trained_rows(ids_T: IntArray, end_T: IntArray, entries: Entries) -> list[Trained]:
    """What the entries train, read with the mask rule alone: the ids that an entry's position may see are the text before its target."""
    rows = []
    for m in range(len(entries)):
        i = int(entries.predict_from_M[m])
        context = tuple(int(ids_T[j]) for j in range(i + 1) if i < end_T[j])
        columns = (entries.temperature_M, entries.behavior_logprobs_M, entries.advantage_M, entries.weight_M, entries.version_M)
        rows.append((int(entries.sequence_M[m]), context, int(entries.target_M[m]), *(c[m].item() for c in columns)))
    return rows


@st.composite
def batches(draw: st.DrawFn, max_groups: int = 3, max_tokens: int = 4) -> list[EpisodeGroup]:
    """Groups over a tiny vocabulary, so that heads are shared in every way: within and across groups, as prefixes, as duplicates, by forks."""
    ids = st.integers(0, 1)
    groups = []
    for g in range(draw(st.integers(0, max_groups))):
        episodes = []
        for member in range(draw(st.integers(1, 4))):
            turns: list[Turn] = []
            length = 0
            for _ in range(draw(st.integers(0, 4))):
                keep = draw(st.none() | st.integers(0, length))
                num_kept = length if keep is None else keep
                observed = tuple(draw(st.lists(ids, min_size=0 if num_kept else 1, max_size=max_tokens)))
                sampled = tuple(draw(st.lists(ids, max_size=max_tokens)))
                turns.append(turn(observed, sampled, draw(st.sampled_from([0.0, 0.7, 1.0])), draw(st.integers(0, 3)), keep))
                length = num_kept + len(observed) + len(sampled)
            reward = draw(st.sampled_from([0.0, 0.5, 1.0]))
            episodes.append(episode(member, *turns, reward=reward, truncated=draw(st.booleans())))
        groups.append(group(*draw(st.permutations(episodes)), name=f"group-{g}"))
    return groups


def forked_batch(
    num_groups: int = 4, group_size: int = 8, *, header: int = 30, prompt: int = 100, answer: int = 40, seed: int = 0
) -> list[EpisodeGroup]:
    """Groups with a common header, a prompt each, and an answer per episode: the usual shape of single-turn training."""
    rng = np.random.default_rng(seed)
    shared = tuple(rng.integers(1, 1000, header).tolist())
    member = count()
    groups = []
    for g in range(num_groups):
        asked = shared + tuple(rng.integers(1, 1000, prompt).tolist())
        episodes = [
            episode(next(member), turn(asked, tuple(rng.integers(1, 1000, rng.integers(1, answer + 1)).tolist())), reward=float(k % 3))
            for k in range(group_size)
        ]
        groups.append(group(*episodes, name=f"group-{g}"))
    return groups
