"""Evaluation: held-out tasks, greedy, at one pinned version, played by the very function that plays training episodes."""

from dataclasses import dataclass, replace

from noria.actors.group import EpisodeFailure, play_all
from noria.actors.room import Room
from noria.actors.rules import EpisodeRules, Seams
from noria.errors import EnvironmentFailedError
from noria.protocols import EnvironmentFactory
from noria.types import Task

SOLVED = 1.0
"""A task counts as solved from this reward on: the full mark of all built-in environments."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Of one version. Failed tasks are in no mean.

    mean_reward; accuracy: fraction with a reward of 1 or more; rewards: per task, None where it failed; failures: those; num_failed: their number.
    """

    version: int
    mean_reward: float
    accuracy: float
    rewards: tuple[float | None, ...]
    failures: tuple[EpisodeFailure, ...]

    @property
    def num_failed(self) -> int:
        """Tasks without a reward."""
        return len(self.failures)


def held_out_tasks(environment: EnvironmentFactory, num_tasks: int) -> list[Task]:
    """The first `num_tasks` held-out tasks, or as many as there are: the indices from the environment's `num_tasks` on, which no run is leased."""
    return [Task(environment.num_tasks + i, seed=0) for i in range(min(num_tasks, environment.num_held_out))]


async def evaluate(seams: Seams, rules: EpisodeRules, tasks: list[Task], *, version: int, name: str, tries: int, room: Room) -> EvaluationResult:
    """Play each task once, greedily, with the adapter of `version`. name: unique; episode ids begin with it. tries: per task.

    Raises EnvironmentFailedError if every task failed, and what the sampler raises.
    """
    assert tasks
    greedy = replace(rules, temperature=0.0, version=version)
    played = await play_all(seams, greedy, [(task, f"{name}/{i}", i) for i, task in enumerate(tasks)], tries=tries, room=room)
    rewards = [None if p.episode is None else p.episode.reward for p in played]
    failures = tuple(p.failure for p in played if p.failure is not None)
    finished = [reward for reward in rewards if reward is not None]
    if not finished:
        raise EnvironmentFailedError(f"evaluation {name}: all {len(tasks)} tasks failed; the first: {failures[0].message}")
    solved = sum(reward >= SOLVED for reward in finished)
    return EvaluationResult(version, sum(finished) / len(finished), solved / len(finished), tuple(rewards), failures)
