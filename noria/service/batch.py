"""A batch of leased groups on its way into the learner, and what is recorded of its step. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from noria.config import AlgorithmConfig
from noria.learner.learner import StepResult
from noria.rl.packing import MicrobatchShape, cut
from noria.rl.tree import BatchStatistics, build_tree, trained_groups
from noria.types import EpisodeGroup, Piece


@dataclass(frozen=True, slots=True)
class Batch:
    """Leased groups, ready to train. pieces: none if there is nothing to train. trained, untrained: ids of the groups with entries, and without."""

    groups: Sequence[EpisodeGroup]
    pieces: tuple[Piece, ...]
    statistics: BatchStatistics
    trained: tuple[str, ...]
    untrained: tuple[str, ...]


def prepare(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig, shape: MicrobatchShape) -> Batch:
    """The batch as the learner takes it. Raises InvalidRequestError, RewardNotFiniteError, TreeTooLargeError: groups that cannot be trained."""
    tree, statistics = build_tree(groups, algorithm)
    has_entries = trained_groups(groups, tree)
    ids = [group.group_id for group in groups]
    trained, untrained = tuple(i for i in ids if i in has_entries), tuple(i for i in ids if i not in has_entries)
    return Batch(groups, cut(tree, shape), statistics, trained, untrained)


def step_metrics(batch: Batch, result: StepResult, version: int) -> dict[str, float]:
    """What is stored with the version that a step made: plain numbers. version: the learner's when it trained."""
    groups, statistics = batch.groups, batch.statistics
    staleness = [version - group.oldest_version for group in groups if group.oldest_version is not None]
    return {
        **result.metrics,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "reward_mean": statistics.reward_mean,
        "reward_std": statistics.reward_std,
        **{f"reward_part_{name}": mean for name, mean in statistics.reward_parts.items()},
        "num_groups_without_signal": statistics.num_groups_without_signal,
        "num_truncated": statistics.num_truncated,
        "num_failed": statistics.num_failed,
        "completion_length_mean": statistics.completion_length_mean,
        "num_positions": result.num_positions,
        "num_positions_unshared": statistics.num_positions_unshared,
        "tokens_sampled": sum(episode.num_sampled for group in groups for episode in group.episodes),
        "staleness_max": max(staleness, default=0),
        "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "device_s": result.device_s,
    }
