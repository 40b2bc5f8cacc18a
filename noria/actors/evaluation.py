"""Evaluation: held-out tasks at one pinned version, played by the very function that plays training episodes, and put into no buffer.

Every task is tried `samples` times. A request's seed comes from the run's seed, the task and the sample, and never from the version: two versions are
compared on the same draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import TypeAlias

from noria.actors.group import EpisodeFailure, play_all
from noria.actors.room import Room
from noria.actors.rules import EpisodeRules, Seams
from noria.errors import EnvironmentFailedError
from noria.protocols import EnvironmentFactory
from noria.types import Task

Rewards: TypeAlias = tuple[float | None, ...]
"""Of one task, by sample; None where the episode failed."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Of one version. Every task weighs the same, whatever part of its samples failed; failed episodes, and tasks with no other, are in no mean.

    accuracy: mean over tasks of the fraction of solved samples, which is pass@1. mean_reward: mean over tasks of the mean reward of their samples.
    pass_at: pass@k by k = 1, 2, 4, ... up to the number of samples; a k that no task has samples enough for is left out.
    rewards: per task and sample. failures: of episodes, one each.
    """

    version: int
    accuracy: float
    mean_reward: float
    pass_at: Mapping[int, float]
    rewards: tuple[Rewards, ...]
    failures: tuple[EpisodeFailure, ...]

    @property
    def num_failed(self) -> int:
        """Episodes without a reward."""
        return len(self.failures)


def held_out_tasks(environment: EnvironmentFactory, num_tasks: int) -> list[Task]:
    """The first `num_tasks` held-out tasks, or as many as there are: the indices from the environment's `num_tasks` on, which no run is leased."""
    return [Task(environment.num_tasks + i, seed=0) for i in range(min(num_tasks, environment.num_held_out))]


async def evaluate(
    seams: Seams, rules: EpisodeRules, tasks: Sequence[Task], *, samples: int, solved_at: float, name: str, tries: int, room: Room
) -> EvaluationResult:
    """Play each task `samples` times. rules: with the pinned version, and the evaluation's temperature. name: unique; episode ids begin with it.

    solved_at: a sample solves its task from this reward on. tries: per episode.

    Raises EnvironmentFailedError if every episode failed, and what the sampler raises.
    """
    assert tasks
    assert samples >= 1
    assert rules.version is not None
    episodes = [(task, f"{name}/{i}/{sample}", sample) for i, task in enumerate(tasks) for sample in range(samples)]
    played = await play_all(seams, rules, episodes, tries=tries, room=room)
    failures = tuple(p.failure for p in played if p.failure is not None)
    if len(failures) == len(played):
        raise EnvironmentFailedError(f"evaluation {name}: all {len(tasks)} tasks failed; the first: {failures[0].message}")
    rewards = [None if p.episode is None else p.episode.reward for p in played]
    by_task = tuple(tuple(rewards[first : first + samples]) for first in range(0, len(rewards), samples))
    return _result(rules.version, by_task, failures, solved_at)


def _result(version: int, rewards: tuple[Rewards, ...], failures: tuple[EpisodeFailure, ...], solved_at: float) -> EvaluationResult:
    finished = [task for row in rewards if (task := [reward for reward in row if reward is not None])]
    counts = [(len(task), sum(reward >= solved_at for reward in task)) for task in finished]
    pass_at, k = {}, 1
    while k <= len(rewards[0]):
        if chances := [pass_at_k(n, solved, k) for n, solved in counts if n >= k]:
            pass_at[k] = fmean(chances)
        k *= 2
    accuracy = fmean(solved / n for n, solved in counts)
    return EvaluationResult(version, accuracy, fmean(fmean(task) for task in finished), pass_at, rewards, failures)


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The chance that at least one of k samples solves the task, estimated without bias from `num_samples` >= k of which `num_solved` do.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1), in whole numbers
    until the division.
    """
    assert 0 <= num_solved <= num_samples
    assert 1 <= k <= num_samples
    return 1 - comb(num_samples - num_solved, k) / comb(num_samples, k)
