"""How far a run is: what its own tasks share, and what the live table, reports and tests read of it."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar, final

from noria.actors.rules import EpisodeRules
from noria.config import RunConfig
from noria.observe import log_event
from noria.service import store
from noria.service.stages import Stages
from noria.service.tasks import RunTasks

log = logging.getLogger(__name__)

T = TypeVar("T")

REWARD_WINDOW = 5
"""Steps of the moving reward that reports and the live table show."""


@dataclass(slots=True)
class RunProgress:
    """What others read of a run; written by the run's tasks only.

    version: the newest published one. evaluations: accuracy by version. rewards: mean raw reward of each trained batch of groups, by step of
    reinforcement learning: the first belongs to version num_supervised_steps + 1. supervised_losses: nll_mean of each step of the supervised phase.
    tokens_trained: entries, of both. staleness: of the newest step.
    """

    version: int = 0
    status: str = store.RUNNING
    message: str = ""
    evaluations: dict[int, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    supervised_losses: list[float] = field(default_factory=list)
    tokens_trained: int = 0
    staleness: int = 0
    max_staleness_seen: int = 0
    num_outstanding: int = 0


@final
class RunState:
    """What the tasks of one run share. Touched by the event loop only.

    admission: held from a step's commit to its publish, and while a group is admitted, so that no group ever samples a version that its place does
    not account for. exhausted: why the run should end early, "" if it should not. is_up: it is in the store, and its status there is this one's.
    """

    def __init__(self, config: RunConfig, rules: EpisodeRules, stages: Stages, tasks: RunTasks) -> None:
        self.config, self.rules, self.stages, self.tasks = config, rules, stages, tasks
        self.progress = RunProgress()
        self.admission = asyncio.Lock()
        self.exhausted = ""
        self.is_up = False
        self._outstanding: set[str] = set()
        self._changed = asyncio.Event()
        self.generation = 0

    @property
    def run_id(self) -> str:
        """The run's name, unique in its server."""
        return self.config.name

    @property
    def is_supervised(self) -> bool:
        """The supervised phase has not ended."""
        return self.progress.version < self.config.num_supervised_steps

    @property
    def num_outstanding(self) -> int:
        """Groups between admission and settlement."""
        return len(self._outstanding)

    def admitted(self, group_ids: Iterable[str]) -> None:
        """These groups hold places."""
        self._outstanding.update(group_ids)
        self.progress.num_outstanding = len(self._outstanding)

    def settled(self, group_ids: Iterable[str]) -> None:
        """These groups hold places no more."""
        self._outstanding.difference_update(group_ids)
        self.progress.num_outstanding = len(self._outstanding)

    def all_settled(self) -> None:
        """No group holds a place."""
        self.settled(tuple(self._outstanding))

    def count_step(self, version: int, metrics: Mapping[str, float]) -> None:
        """The step that made `version` is committed. metrics: as stored with it."""
        progress = self.progress
        progress.tokens_trained += int(metrics["num_entries"])
        if version <= self.config.num_supervised_steps:
            progress.supervised_losses.append(metrics["nll_mean"])
            log_event(log, logging.INFO, "supervised step", run_id=self.run_id, version=version, nll=metrics["nll_mean"])
            return
        progress.rewards.append(metrics["reward_mean"])
        progress.staleness = int(metrics["staleness_max"])
        progress.max_staleness_seen = max(progress.max_staleness_seen, progress.staleness)
        log_event(log, logging.INFO, "step", run_id=self.run_id, version=version, reward=metrics["reward_mean"])

    def change(self) -> None:
        """Something happened that a waiting task may wait for."""
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def change_since(self, seen: int) -> None:
        """Return once something has changed since generation `seen`, which was read before the state that made the caller wait."""
        while self.generation == seen:
            await self._changed.wait()

    async def wait_for(self, future: "Future[T]", timeout_s: float, what: str) -> T:
        """The future's result. Raises what it raises, and DeadlineExceededError naming run and `what`."""
        return await self.stages.clock.wait_for(asyncio.wrap_future(future), timeout_s, f"run {self.run_id}: {what}")
