"""The actors of one process: bounded concurrency over many runs, counters, and an orderly end.

Deliberately not here: which group to play next. That is the loop's, and it stays the caller's to put the outcome into the buffer, or to drop it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, final

from noria.actors.evaluation import EvaluationResult, evaluate
from noria.actors.group import EpisodeFailure, GroupOutcome, run_group
from noria.actors.load import LoadedEnvironment, load_environment
from noria.actors.loops import EnvironmentLoops
from noria.actors.room import Room
from noria.actors.rules import EpisodeRules, Seams
from noria.actors.threads import AbandonableThreads, HungThreads
from noria.config import RunConfig
from noria.errors import StageStoppedError
from noria.protocols import Clock, Environment, Lease, Sampler, Spans, Tokenizer
from noria.text.chat import ChatFormat
from noria.types import Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """num_playing: episodes under way. num_finished: episodes that succeeded. num_retries: tries that failed and were repeated.

    failures: episodes failed for good, by error code. num_hung: threads of environments that were given up and still run.
    """

    num_playing: int
    num_finished: int
    num_retries: int
    failures: dict[str, int]
    num_hung: int


@final
class ActorPool:
    """Plays groups and evaluations. All state belongs to the event loop that calls it."""

    def __init__(
        self, sampler: Sampler, tokenizer: Tokenizer, clock: Clock, spans: Spans, *, chat: ChatFormat | None = None, max_episodes: int = 256
    ) -> None:
        """chat: the base's chat template, if it has one. max_episodes: played at once, over all runs, which get equal parts when it is not enough."""
        assert max_episodes >= 1
        self._hung = HungThreads()
        self._threads = AbandonableThreads(max_episodes, self._hung)
        self._loops = EnvironmentLoops(self._hung)
        self._seams = Seams(sampler, tokenizer, clock, spans, self._threads, self._loops, chat)
        self._room = Room(max_episodes, spans)
        self._work: set[asyncio.Task[Any]] = set()
        self._names = count()
        self._is_closed = False
        self._num_finished = 0
        self._num_retries = 0
        self._failures: Counter[str] = Counter()

    async def load(self, config: RunConfig, *, builtin: Mapping[str, Callable[..., Environment]], folder: Path) -> LoadedEnvironment:
        """The environment of a run file: its code is imported and built in a thread that can be given up. builtin, folder: as `load_environment`.

        Raises as `load_environment`; DeadlineExceededError if it takes more than `reset_s`, StageStoppedError when the pool is closed.
        """
        loading = self._threads.run(config.name, partial(load_environment, config.environment, builtin=builtin, folder=folder))
        return await self._seams.clock.wait_for(loading, config.deadlines.reset_s, f"environment {config.environment.name!r} to load")

    def forget(self, run_id: str) -> None:
        """The run has ended: let its event loop go, once its last episode has ended. A run that plays on gets another."""
        self._loops.forget(run_id)

    async def play_group(self, rules: EpisodeRules, lease: Lease, *, group_size: int, episode_tries: int) -> GroupOutcome:
        """Play the leased group. Raises as `run_group`, and StageStoppedError when the pool is or gets closed."""
        outcome = await self._track(run_group(self._seams, rules, lease, group_size=group_size, episode_tries=episode_tries, room=self._room))
        self._count(group_size - len(outcome.failures), outcome.failures)
        self._num_retries += outcome.num_retries
        return outcome

    async def evaluate(
        self,
        rules: EpisodeRules,
        tasks: list[Task],
        *,
        version: int,
        samples: int = 1,
        temperature: float = 0.0,
        solved_at: float = 1.0,
        tries: int = 3,
    ) -> EvaluationResult:
        """Play held-out tasks at `version`; temperature 0 is greedy; solved_at: as `evaluate`.

        Raises as `evaluate`, and StageStoppedError when the pool is or gets closed.
        """
        name = f"{rules.run_id}/evaluation-{next(self._names)}"
        pinned = replace(rules, version=version, temperature=temperature)
        played = evaluate(self._seams, pinned, tasks, samples=samples, solved_at=solved_at, name=name, tries=tries, room=self._room)
        result = await self._track(played)
        self._count(samples * len(tasks) - result.num_failed, result.failures)
        return result

    def counts(self) -> PoolCounts:
        """The counters now."""
        return PoolCounts(self._room.num_inside, self._num_finished, self._num_retries, dict(self._failures), self._hung.num_hung)

    async def close(self, *, drain_s: float = 60.0) -> None:
        """Refuse new work, cancel what is under way, wait until it has let go, and give the threads up. Idempotent.

        Raises DeadlineExceededError if something has not let go after `drain_s` seconds.
        """
        self._is_closed = True
        for task in self._work:
            task.cancel()
        self._threads.shutdown()
        self._loops.shutdown()
        if self._work:
            await self._seams.clock.wait_for(asyncio.wait(list(self._work)), drain_s, f"{len(self._work)} groups to stop")

    def _count(self, num_finished: int, failures: tuple[EpisodeFailure, ...]) -> None:
        self._num_finished += num_finished
        self._failures.update(failure.code for failure in failures)

    async def _track(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            work.close()
            raise StageStoppedError("the actors are shutting down; no more episodes are played")
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                raise StageStoppedError("the actors were shut down while this was played") from None
            raise
