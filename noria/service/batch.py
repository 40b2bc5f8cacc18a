"""A batch of leased groups on its way into the learner, and what is recorded of its step.

    groups ──▶ draft ──ask──▶ scores      only for a critic, or a penalty in the reward: the learner is asked before the advantages are known
       └─────────────────────────┴──▶ prepare ──▶ Batch ──▶ learner ──▶ step_metrics

All but `ask` are pure functions; so a step that is taken again (`service/recorded_step.py`) has the same batch.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from noria.config import AlgorithmConfig, RunConfig
from noria.learner.batches import BatchPlanner, PlannedBatch
from noria.learner.learner import Learner
from noria.learner.operations import BatchResult, StepResult
from noria.rl.credit import TokenScores, needs_reference, needs_values
from noria.rl.staleness import rate_scale
from noria.rl.tree import BatchStatistics, build_batch, scoring_tree, trained_groups
from noria.types import EpisodeGroup, LossSpec, OptimizerSpec, Piece

SCORING_LOSS: Final = LossSpec(kind="linear")
"""Of a pass that asks for outputs alone: it reads nothing, and of advantages that are 0 it is 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Leased groups, ready to train. planned: as the learner takes it. trained, untrained: ids of the groups with entries, and without.

    scoring_metrics: of what was scored before, its device seconds as `device_s`; none if nothing was.
    """

    groups: Sequence[EpisodeGroup]
    planned: PlannedBatch
    statistics: BatchStatistics
    trained: tuple[str, ...]
    untrained: tuple[str, ...]
    scoring_metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What the learner visits one after another; none if there is nothing to train."""
        return self.planned.parts


@dataclass(frozen=True, slots=True)
class Scored:
    """A draft with the learner's answers. results: of `ask`, in its order."""

    draft: PlannedBatch
    results: Sequence[BatchResult]

    def scores(self, algorithm: AlgorithmConfig) -> TokenScores:
        """What credit reads of it."""
        outputs = [result.outputs for result in self.results]
        values_M = outputs[0].value_M if needs_values(algorithm) else None
        return TokenScores(values_M, outputs[-1].learner_logprobs_M if needs_reference(algorithm) else None)

    def metrics(self, algorithm: AlgorithmConfig) -> dict[str, float]:
        """Plain numbers. kl_mean: the k1 estimate of the divergence that the reward is charged for, by token, nats."""
        metrics = {"device_s": sum(result.device_s for result in self.results)}
        reference_M = self.scores(algorithm).reference_logprobs_M
        if reference_M is not None:
            metrics["kl_mean"] = float(np.mean(self.draft.entries.behavior_logprobs_M - reference_M, dtype=np.float64))
        return metrics


def draft(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig, planner: BatchPlanner) -> PlannedBatch | None:
    """What the learner must be asked before the batch can be prepared; None for nothing. planner, errors: as `prepare`."""
    tree = scoring_tree(groups, algorithm)
    return None if tree is None else planner.plan(tree)


def ask(learner: Learner, run_id: str, drafted: PlannedBatch, algorithm: AlgorithmConfig) -> "list[Future[BatchResult]]":
    """Submit the passes over a draft: for the critic's values, for the reference's log-probabilities. The futures raise as `Learner.forward`."""
    passes = [False] * needs_values(algorithm) + [True] * needs_reference(algorithm)
    return [learner.forward(run_id, drafted, SCORING_LOSS, of_base=of_base) for of_base in passes]


def prepare(groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig, planner: BatchPlanner, *, scored: Scored | None = None) -> Batch:
    """The batch as the learner takes it. planner: the learner's own. scored: the groups' `draft`, if they have one.

    Raises InvalidRequestError, RewardNotFiniteError, TreeTooLargeError: groups that cannot be trained.
    """
    made = build_batch(groups, algorithm, None if scored is None else scored.scores(algorithm))
    has_entries = trained_groups(groups, made.tree)
    ids = [group.group_id for group in groups]
    trained, untrained = tuple(i for i in ids if i in has_entries), tuple(i for i in ids if i not in has_entries)
    planned = planner.plan(made.tree, columns=made.columns, prefix_gradient=algorithm.prefix_gradient)
    return Batch(groups, planned, made.statistics, trained, untrained, {} if scored is None else scored.metrics(algorithm))


def step_rate_scale(batch: Batch, algorithm: AlgorithmConfig, version: int) -> float:
    """What the step's learning rate is multiplied by, for the mean staleness of what it trains. version: as of `step_metrics`."""
    version_M = batch.planned.entries.version_M
    return rate_scale(float(np.maximum(version - version_M, 0).mean()) if len(version_M) else 0.0, algorithm.stale_rate_k)


def step_optimizer(batch: Batch, config: RunConfig, version: int) -> OptimizerSpec:
    """The optimizer of the batch's step. version: as of `step_metrics`."""
    optimizer = config.optimizer
    return replace(optimizer, learning_rate=optimizer.learning_rate * step_rate_scale(batch, config.algorithm, version))


def step_metrics(batch: Batch, result: StepResult, algorithm: AlgorithmConfig, version: int) -> dict[str, float]:
    """What is stored with the version that a step made: plain numbers. version: the learner's when it trained."""
    groups, statistics = batch.groups, batch.statistics
    staleness = [version - group.oldest_version for group in groups if group.oldest_version is not None]
    return {
        **batch.scoring_metrics,
        **result.metrics,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        **({"rate_scale": step_rate_scale(batch, algorithm, version)} if algorithm.stale_rate_k else {}),
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
        "device_s": result.device_s + batch.scoring_metrics.get("device_s", 0.0),
    }
