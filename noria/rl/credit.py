"""Which sampled tokens of a batch train, and with what credit: advantages, a critic's targets, preference pairs, masks, weights.

    groups ──▶ what is to be scored first: `scored_episodes` ──the learner──▶ TokenScores ──┐
       └──────────────────────────────────────────────────────────────────────────────────┴──▶ candidates ──weights──▶ rows (rl/tree.py)

Most losses need no scores: a group's rewards are all there is. A critic's advantages come from its values before the step (`rl/returns.py`), a
penalty in the reward from the reference's log-probabilities (`rl/kl.py`); both are of the same tokens, in the same order.

A trainable token is one that was drawn from the whole policy at a temperature above 0 (`types.Turn.is_trainable`); others are, to all of this, the
environment's.

Shape letters: M trainable token, G group member.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from noria.config import AlgorithmConfig
from noria.rl.advantages import group_advantages
from noria.rl.kl import kl_rewards, rewards_with_kl
from noria.rl.preference import preference_pairs
from noria.rl.returns import gae, token_rewards
from noria.types import Denominator, Episode, EpisodeGroup, FloatArray, IntArray, Turn


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the learner says of the trainable tokens of `scored_episodes`, one after another, before the step: float32 [M], None where not needed.

    values_M: the critic's. reference_logprobs_M: with the adapter off.
    """

    values_M: FloatArray | None = None
    reference_logprobs_M: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class BatchEpisode:
    """An episode with its index among all episodes of the batch (groups in order, members in order), and its group's. num_tokens: trainable ones."""

    episode: Episode
    index: int
    group: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode that counts in the denominator, at least one trainable token; in a loss of pairs once for each of its pairs.

    advantage_M, columns: of its trainable tokens, in the order in which they were sampled; columns as `learner.batches.COLUMNS` names them.
    """

    of: BatchEpisode
    advantage_M: FloatArray
    columns: Mapping[str, FloatArray | IntArray] = field(default_factory=dict)


def needs_values(algorithm: AlgorithmConfig) -> bool:
    """Whether credit needs the critic's values."""
    return algorithm.loss == "ppo_critic"


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether credit needs the reference's log-probabilities: a penalty in the reward. For a loss that reads them, the learner finds its own."""
    return algorithm.kl == "reward" and algorithm.kl_coeff != 0


def scored_episodes(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig) -> list[BatchEpisode]:
    """The episodes whose trainable tokens must be scored before the batch's credit is known; none for most losses.

    A critic scores what it trains on. A group's baseline is of all its members, so a penalty in the reward needs all of every group that trains.
    """
    if needs_values(algorithm):
        return [each for each in _batch_episodes(groups) if _is_trainable(each, algorithm)]
    if needs_reference(algorithm):
        trains = [_trains(group, algorithm) for group in groups]
        return [each for each in _batch_episodes(groups) if each.num_tokens and trains[each.group]]
    return []


def candidates_of(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig, scores: TokenScores | None = None) -> list[Candidate]:
    """The episodes that count in the denominator, by index. scores: of `scored_episodes`, if there are any.

    Raises RewardNotFiniteError: see `group_advantages`.
    """
    if algorithm.loss == "dpo":
        return _paired(groups, algorithm)
    trains = [_trains(group, algorithm) for group in groups]
    values, penalties = _by_episode(groups, algorithm, scores)
    trainable = [each for each in _batch_episodes(groups) if trains[each.group] and _is_trainable(each, algorithm)]
    if needs_values(algorithm):
        return [_criticized(each, values[each.index], penalties.get(each.index), algorithm) for each in trainable]
    members: list[list[BatchEpisode]] = [[] for _ in groups]
    for each in _batch_episodes(groups):
        members[each.group].append(each)
    nothing = np.zeros(0, np.float32)
    advantages: dict[int, float] = {}
    for own in members:
        rewards_G: npt.ArrayLike = [_reward(each.episode, algorithm) for each in own]
        if penalties:
            rewards_G = rewards_with_kl(rewards_G, [penalties.get(each.index, nothing) for each in own])
        advantages |= zip([each.index for each in own], group_advantages(rewards_G, algorithm.advantage).tolist(), strict=True)
    return [Candidate(each, np.full(each.num_tokens, advantages[each.index], np.float32)) for each in trainable]


def token_weights(candidates: Sequence[Candidate], denominator: Denominator) -> list[float]:
    """The weight of each token of each candidate: 1 / denominator, see `rl.tree.build_batch`."""
    groups = [candidate.of.group for candidate in candidates]
    if any("pair_M" in candidate.columns for candidate in candidates):
        return unit_weights([1] * len(candidates), groups, denominator, share=0.5)  # a pair's weight stands on each of its tokens, and counts once
    return unit_weights([candidate.of.num_tokens for candidate in candidates], groups, denominator)


def unit_weights(counts: Sequence[int], groups: Sequence[int], denominator: Denominator, *, share: float = 1.0) -> list[float]:
    """The weight of each token of each episode that counts in the denominator.

    counts: units of each episode, at least 1: its tokens. groups: which group it belongs to; any numbers, equal within a group. share: of a unit
    that one episode has; a pair is one of two.
    """
    match denominator:
        case "tokens":
            total = share * sum(counts)
            return [1 / total for _ in counts]
        case "episodes":
            return [1 / (len(counts) * count) for count in counts]
        case "groups":
            units_of: Counter[int] = Counter()
            for group, count in zip(groups, counts, strict=True):
                units_of[group] += count
            return [1 / (len(units_of) * share * units_of[group]) for group in groups]
        case "none":
            return [1.0 for _ in counts]


def episode_advantages(group: EpisodeGroup, algorithm: AlgorithmConfig) -> FloatArray:
    """The advantage of each episode of the group by its rewards alone, by member: no critic, no penalty.

    Raises RewardNotFiniteError: see `group_advantages`.
    """
    return group_advantages(counted_rewards(group, algorithm), algorithm.advantage)


def counted_rewards(group: EpisodeGroup, algorithm: AlgorithmConfig) -> list[float]:
    """The reward that each episode's advantage is made of, by member: its own, or 0 for a truncated one under "penalize"."""
    return [_reward(e, algorithm) for e in _members(group)]


def has_signal(group: EpisodeGroup, algorithm: AlgorithmConfig) -> bool:
    """Whether there is anything to learn from the group: exactly then it trains under `zero_signal = "skip"`.

    A critic learns from every trainable token; dpo from pairs; the others from rewards that differ, whatever a penalty then adds to them.
    Raises RewardNotFiniteError: see `group_advantages`.
    """
    advantages_G = episode_advantages(group, algorithm)
    if algorithm.loss == "dpo":
        return bool(_pairs(list(_batch_episodes([group])), algorithm))
    is_trainable = [_is_trainable(each, algorithm) for each in _batch_episodes([group])]
    return any(is_trainable) if needs_values(algorithm) else bool(advantages_G[is_trainable].any())


def trained_members(group: EpisodeGroup, algorithm: AlgorithmConfig) -> frozenset[int]:
    """Members of a group that has trained, of which it has entries; also those whose advantage only a penalty in the reward moves from 0."""
    own = list(_batch_episodes([group]))
    if algorithm.loss == "dpo":
        return frozenset(own[i].episode.member for pair in _pairs(own, algorithm) for i in pair)
    is_pruned = algorithm.zero_signal != "train" and not needs_values(algorithm) and not needs_reference(algorithm)
    advantages = episode_advantages(group, algorithm).tolist()
    return frozenset(
        each.episode.member
        for each, advantage in zip(own, advantages, strict=True)
        if _is_trainable(each, algorithm) and (advantage != 0.0 or not is_pruned)
    )


def trained_turns(group: EpisodeGroup, algorithm: AlgorithmConfig) -> tuple[tuple[bool, ...], ...]:
    """Which turns train, of each episode of the group by member: what was sampled in exactly these are the entries of the group in its batch.

    Raises RewardNotFiniteError: see `group_advantages`.
    """
    trained = trained_members(group, algorithm) if _trains(group, algorithm) else frozenset()
    return tuple(tuple(e.member in trained and turn.is_trainable for turn in e.turns) for e in _members(group))


def trainable_turns(episode: Episode) -> list[Turn]:
    """The turns that have trainable tokens."""
    return [turn for turn in episode.turns if turn.is_trainable]


def _members(group: EpisodeGroup) -> list[Episode]:
    return sorted(group.episodes, key=lambda e: e.member)


def _batch_episodes(groups: Sequence[EpisodeGroup]) -> Iterator[BatchEpisode]:
    index = 0
    for number, group in enumerate(groups):
        for episode in _members(group):
            yield BatchEpisode(episode, index, number, sum(len(turn.completion.sampled_ids) for turn in trainable_turns(episode)))
            index += 1


def _reward(episode: Episode, algorithm: AlgorithmConfig) -> float:
    return 0.0 if episode.truncated and algorithm.truncated == "penalize" else episode.reward


def _is_trainable(each: BatchEpisode, algorithm: AlgorithmConfig) -> bool:
    return each.num_tokens > 0 and not (each.episode.truncated and algorithm.truncated == "mask")


def _trains(group: EpisodeGroup, algorithm: AlgorithmConfig) -> bool:
    return has_signal(group, algorithm) or algorithm.zero_signal == "train"


def _by_episode(
    groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig, scores: TokenScores | None
) -> tuple[dict[int, FloatArray], dict[int, FloatArray]]:
    """Values and penalties in the reward of each scored episode's tokens, by index."""
    scored = scored_episodes(groups, algorithm)
    if not scored:
        return {}, {}
    assert scores is not None, f"loss {algorithm.loss} needs scores before its advantages"
    cuts, indices = np.cumsum([each.num_tokens for each in scored])[:-1], [each.index for each in scored]
    values: dict[int, FloatArray] = {}
    penalties: dict[int, FloatArray] = {}
    if needs_values(algorithm):
        assert scores.values_M is not None
        values = dict(zip(indices, np.split(scores.values_M, cuts), strict=True))
    if needs_reference(algorithm):
        assert scores.reference_logprobs_M is not None
        behavior_M = np.concatenate([np.array(turn.completion.behavior_logprobs) for each in scored for turn in trainable_turns(each.episode)])
        penalties = dict(zip(indices, np.split(kl_rewards(behavior_M, scores.reference_logprobs_M, algorithm.kl_coeff), cuts), strict=True))
    return values, penalties


def _criticized(each: BatchEpisode, values_M: FloatArray, penalties_M: FloatArray | None, algorithm: AlgorithmConfig) -> Candidate:
    """An episode with a critic's advantages and targets. Its reward comes at its last token, and nothing after it, cut or not: a limit on tokens or
    turns is part of the task."""
    lengths = [len(turn.completion.sampled_ids) for turn in trainable_turns(each.episode)]
    rewards_M = token_rewards(lengths, [*(0.0 for _ in lengths[1:]), _reward(each.episode, algorithm)])
    if penalties_M is not None:
        rewards_M = rewards_M + penalties_M
    advantage_M, returns_M = gae(values_M, rewards_M, gae_lambda=algorithm.gae_lambda, gamma=algorithm.gae_gamma)
    return Candidate(each, advantage_M, {"returns_M": returns_M, "behavior_values_M": values_M})


def _pairs(own: Sequence[BatchEpisode], algorithm: AlgorithmConfig) -> list[tuple[int, int]]:
    """(chosen, rejected) of one group, as indices into `own`."""
    kept = [i for i, each in enumerate(own) if _is_trainable(each, algorithm)]
    pairs = preference_pairs([_reward(own[i].episode, algorithm) for i in kept], algorithm.pairs)
    return [(kept[pair.chosen], kept[pair.rejected]) for pair in pairs]


def _paired(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig) -> list[Candidate]:
    """Both sides of every pair, by episode and then by pair. Pairs are numbered through the batch."""
    members: list[list[BatchEpisode]] = [[] for _ in groups]
    for each in _batch_episodes(groups):
        members[each.group].append(each)
    pairs = [(own[i], own[j]) for own in members for i, j in _pairs(own, algorithm)]
    sides = [(each, number, sign) for number, pair in enumerate(pairs) for each, sign in zip(pair, (1.0, -1.0), strict=True)]
    return [
        Candidate(each, np.full(each.num_tokens, sign, np.float32), {"pair_M": np.full(each.num_tokens, number, np.int32)})
        for each, number, sign in sorted(sides, key=lambda side: (side[0].index, side[1]))
    ]
