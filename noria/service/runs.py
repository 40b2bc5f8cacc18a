"""One run on its way: its actors' groups in, its optimizer steps out. Three tasks that wait for data and for nothing else.

    admission   a place is free and a task is left       ──▶ lease ──▶ actors play the group ──▶ buffer
    training    a batch can be formed within the bound   ──▶ tree ──▶ learner ──▶ commit ──▶ publish ──▶ places are free
    evaluation  a version is due                         ──▶ actors play held-out tasks greedily at that pinned version

A step's commit is: files, then one transaction with the version and the settled groups. Only then is the version published, and only after that is
the next group admitted, so that no group ever samples a version that its place does not account for.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import numpy as np
from sqlalchemy import Connection

from noria.actors.evaluation import EvaluationResult, held_out_tasks
from noria.actors.group import GroupOutcome
from noria.actors.pool import ActorPool
from noria.actors.rules import EpisodeRules
from noria.adapters.versions import VersionFiles
from noria.buffer.sqlite import SqliteBuffer
from noria.config import RunConfig
from noria.errors import DeadlineExceededError, NoriaError, RunFailedError, StageStoppedError
from noria.learner.learner import Learner, RunSpec, StepResult
from noria.model.lora import AdapterState
from noria.observe import log_event
from noria.protocols import Clock, Lease, Spans
from noria.rl.packing import MicrobatchShape, cut
from noria.rl.staleness import form_batch
from noria.rl.tree import BatchStatistics, build_tree
from noria.sampler.engine import SamplerEngine
from noria.service import store
from noria.service.device import SharedDevice
from noria.service.publish import Publisher
from noria.types import AdapterVersion, DropReason, EpisodeGroup, Piece

log = logging.getLogger(__name__)

T = TypeVar("T")

REWARD_WINDOW = 5
"""Steps of the moving reward that reports and the live table show."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What a run uses of its server. All runs share these objects."""

    learner: Learner
    sampler: SamplerEngine
    device: SharedDevice
    publisher: Publisher
    buffer: SqliteBuffer
    pool: ActorPool
    files: VersionFiles
    clock: Clock
    spans: Spans
    shape: MicrobatchShape
    max_rank: int
    keep_versions: int


@dataclass(slots=True)
class RunProgress:
    """What the live table, reports and tests read of a run; written by the run's tasks only.

    evaluations: accuracy by version. rewards: mean raw reward of each trained batch, by step. tokens_trained: entries. staleness: of the newest step.
    """

    version: int = 0
    status: str = store.RUNNING
    message: str = ""
    evaluations: dict[int, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    tokens_trained: int = 0
    staleness: int = 0
    max_staleness_seen: int = 0
    num_outstanding: int = 0


@final
class ActiveRun:
    """Owner of one run's state on the event loop. `start` brings it up from the store, `finished` waits for its end, `stop` lets go."""

    def __init__(self, config: RunConfig, rules: EpisodeRules, stages: Stages, initial: AdapterState) -> None:
        """initial: the state of version 0, used unless the store has a newer one."""
        self.config, self.progress = config, RunProgress()
        self._rules, self._stages, self._initial = rules, stages, initial
        self._algorithm = config.algorithm
        self._outstanding: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._evaluating: set[asyncio.Task[None]] = set()
        self._generation = 0
        self._changed = asyncio.Event()
        self._admission = asyncio.Lock()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failures_in_a_row = 0
        self._batches_without_signal = 0
        self._last_failure = ""
        self._recovered: deque[Lease] = deque()

    @property
    def run_id(self) -> str:
        """The run's name, unique in its server."""
        return self.config.name

    async def start(self) -> None:
        """Create the run, or bring it up at its newest committed version, and start its tasks.

        Raises StateConflictError (known with another configuration), AdapterFileCorruptError, SlotsExhaustedError, PublishProofError.
        """
        stages, config = self._stages, self.config
        await stages.buffer.register_run(
            self.run_id,
            num_tasks=self._rules.environment.num_tasks,
            seed=config.seed,
            num_places=self._algorithm.num_places,
            task_tries=config.actors.task_tries,
        )
        newest, state = await self._restore()
        spec = RunSpec(self.run_id, config.adapter.lora, config.adapter.optimizer, self._algorithm.loss, config.weight)
        await self._on_device(lambda: stages.sampler.set_weight(config.tenant, config.weight), "set a tenant's weight")
        await self._wait_for(stages.learner.load_run(spec, state), config.deadlines.publish_s, "load the run")
        await stages.publisher.publish(newest, state.params, config.adapter.lora)
        leases = await stages.buffer.recover(self.run_id, version=newest.version, deadline_s=self._group_deadline())
        self._recovered.extend(leases)
        waiting = await stages.buffer.outstanding(self.run_id)
        self._outstanding.update(item.group_id for item in waiting)
        self._count_outstanding()
        self._spawn(self._admit_groups, self._tasks)
        self._spawn(self._train, self._tasks)

    async def finished(self) -> None:
        """Wait for the run's end. Raises what made it fail: RunFailedError, PublishProofError, GradientNotFiniteError, StageStoppedError, ..."""
        await asyncio.shield(self._done)

    async def stop(self) -> None:
        """Cancel what is under way and let go; all that is committed stays, and the run can be resumed. Idempotent."""
        tasks = self._tasks | self._evaluating
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._done.done():
            self._release()
            self._done.set_exception(StageStoppedError(f"run {self.run_id} was stopped at version {self.progress.version}"))
            self._done.exception()  # whoever waits sees it; nobody has to

    # ---- start ------------------------------------------------------------------------------------------------------------------------

    async def _restore(self) -> tuple[AdapterVersion, AdapterState]:
        """The newest committed version with its state; version 0 is committed first for a new run."""
        stages = self._stages
        rows = await stages.buffer.transaction(lambda connection: store.versions(connection, self.run_id))
        if not rows:
            record = await asyncio.to_thread(stages.files.write, self.run_id, 0, self._initial, self.config.adapter.rank)
            await stages.buffer.transaction(partial(self._commit_first, record=record))
            self._seen_version(record.version)
            return record, self._initial
        newest = rows[-1].record
        state = await asyncio.to_thread(stages.files.load, newest, stages.max_rank)
        await asyncio.to_thread(stages.files.keep_only, self.run_id, [row.record.version for row in rows[-stages.keep_versions :]])
        for row in rows[1:]:
            self._count_step(row.record.version, row.metrics)
        self._seen_version(newest.version)
        for evaluation in await stages.buffer.transaction(lambda connection: store.evaluations(connection, self.run_id)):
            self.progress.evaluations[evaluation.version] = evaluation.accuracy
        return newest, state

    def _commit_first(self, connection: Connection, record: AdapterVersion) -> None:
        now_s = self._stages.clock.wall()
        if store.find_run(connection, self.run_id) is None:
            store.create_run(connection, self.config, now_s)
        store.add_version(connection, record, {}, now_s)

    def _seen_version(self, version: int) -> None:
        self.progress.version = version

    # ---- admission --------------------------------------------------------------------------------------------------------------------

    async def _admit_groups(self) -> None:
        while True:
            seen = self._generation
            lease = await self._next_lease()
            if lease is None:
                with self._stages.spans.span("actor", "place", self.run_id, is_wait=True):
                    await self._change_since(seen)
                continue
            self._outstanding.add(lease.group_id)
            self._count_outstanding()
            self._spawn(partial(self._play, lease), self._tasks)

    async def _next_lease(self) -> Lease | None:
        """A lease to play now: one that a restart recovered, or a new one if the run needs another group and has a place for it."""
        if self._recovered:
            return self._recovered.popleft()
        async with self._admission:  # never between a step's commit and its publish
            steps_left = self._algorithm.steps - self.progress.version
            if len(self._outstanding) >= steps_left * self._algorithm.groups_per_batch:
                return None
            return await self._stages.buffer.admit(self.run_id, version=self.progress.version, deadline_s=self._group_deadline())

    def _group_deadline(self) -> float:
        tries = self.config.actors.episode_tries
        return self._stages.clock.wall() + self.config.deadlines.episode_s * tries

    async def _play(self, lease: Lease) -> None:
        try:
            outcome = await self._stages.pool.play_group(
                self._rules, lease, group_size=self._algorithm.group_size, episode_tries=self.config.actors.episode_tries
            )
        except DeadlineExceededError as error:
            await self._give_up(lease.group_id, "deadline", str(error))
        else:
            await self._settle_played(lease, outcome)
        self._change()

    async def _settle_played(self, lease: Lease, outcome: GroupOutcome) -> None:
        for failure in outcome.failures:
            log_event(log, logging.WARNING, "episode failed", run_id=self.run_id, code=failure.code, error=failure.message)
        if outcome.group is None:
            await self._give_up(lease.group_id, "failed", f"{outcome.failures[0].code}: {outcome.failures[0].message}")
        elif await self._stages.buffer.put(outcome.group):
            self._failures_in_a_row = 0
        else:
            self._outstanding.discard(lease.group_id)

    async def _give_up(self, group_id: str, reason: DropReason, why: str) -> None:
        await self._stages.buffer.drop(group_id, reason)
        self._outstanding.discard(group_id)
        self._failures_in_a_row += 1
        self._last_failure = why
        log_event(log, logging.WARNING, "group dropped", run_id=self.run_id, group_id=group_id, reason=reason, error=why)
        limit = self.config.actors.max_failed_groups
        if self._failures_in_a_row >= limit:
            raise RunFailedError(f"run {self.run_id}: {limit} groups in a row failed; the last one with {why}")

    # ---- training ---------------------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        if self._is_evaluation_due(0):
            await self._evaluate_soon(0)
        while self.progress.version < self._algorithm.steps:
            groups = await self._next_batch()
            if not await self._step(groups):
                break
        await asyncio.gather(*self._evaluating)
        if self.progress.version == self._algorithm.steps and self._is_evaluation_due(self.progress.version):
            await self._evaluate(self.progress.version)
        await self._finish()

    async def _next_batch(self) -> list[EpisodeGroup]:
        while True:
            seen = self._generation
            waiting = await self._stages.buffer.outstanding(self.run_id)
            chosen = form_batch(
                waiting,
                version=self.progress.version,
                max_staleness=self._algorithm.max_staleness,
                groups_per_batch=self._algorithm.groups_per_batch,
            )
            if chosen is not None:
                return await self._stages.buffer.lease(self.run_id, chosen)
            with self._stages.spans.span("learner", "batch", self.run_id, is_wait=True):
                await self._change_since(seen)

    async def _step(self, groups: list[EpisodeGroup]) -> bool:
        """Train one batch; whether the run goes on."""
        pieces, statistics, unsignalled = await asyncio.to_thread(self._prepare, groups)
        if not pieces:
            return await self._settle_untrained(groups, statistics)
        self._batches_without_signal = 0
        training = self._stages.learner.train(self.run_id, pieces)
        result = await self._wait_for(training, self.config.deadlines.train_s, f"train the step after version {self.progress.version}")
        staleness = [self.progress.version - g.oldest_version for g in groups if g.oldest_version is not None]
        metrics = _step_metrics(groups, statistics, result, staleness)
        async with self._admission:
            await self._commit(groups, unsignalled, result, metrics)
        self._change()
        version = self.progress.version
        if version < self._algorithm.steps and self._is_evaluation_due(version):
            await self._evaluate_soon(version)
        return True

    def _prepare(self, groups: list[EpisodeGroup]) -> tuple[tuple[Piece, ...], BatchStatistics, set[str]]:
        """The batch's pieces, its statistics, and the ids of the groups that train nothing since their rewards are equal."""
        tree, statistics = build_tree(groups, self._algorithm)
        unsignalled = {g.group_id for g in groups if len({e.reward for e in g.episodes}) == 1}
        return cut(tree, self._stages.shape), statistics, unsignalled if self._algorithm.zero_signal == "skip" else set()

    async def _settle_untrained(self, groups: list[EpisodeGroup], statistics: BatchStatistics) -> bool:
        ids = [g.group_id for g in groups]
        await self._stages.buffer.transaction(lambda connection: self._stages.buffer.settle_dropped(connection, ids, "no_signal"))
        self._outstanding.difference_update(ids)
        self._batches_without_signal += 1
        self._change()
        if self._batches_without_signal < self._algorithm.max_batches_without_signal:
            return True
        self.progress.message = (
            f"stopped early: {self._batches_without_signal} batches in a row had nothing to train; of the last one, "
            f"{statistics.num_groups_without_signal} of {statistics.num_groups} groups had equal rewards and "
            f"{statistics.num_truncated} of {statistics.num_episodes} episodes were cut by max_tokens"
        )
        return False

    async def _commit(self, groups: list[EpisodeGroup], unsignalled: set[str], result: StepResult, metrics: Mapping[str, float]) -> None:
        """Files, then the transaction that is the point of no return, then the publish with its proof."""
        stages, version = self._stages, self.progress.version + 1
        record = await asyncio.to_thread(stages.files.write, self.run_id, version, result.state, self.config.adapter.rank)
        trained = [g.group_id for g in groups if g.group_id not in unsignalled]

        def commit(connection: Connection) -> None:
            store.add_version(connection, record, metrics, stages.clock.wall())
            stages.buffer.settle_trained(connection, trained, version)
            stages.buffer.settle_dropped(connection, sorted(unsignalled), "no_signal")

        await stages.buffer.transaction(commit)
        self._outstanding.difference_update(g.group_id for g in groups)
        self._count_step(version, metrics)
        await stages.publisher.publish(record, result.state.params, self.config.adapter.lora)
        self._seen_version(version)
        await asyncio.to_thread(stages.files.keep_only, self.run_id, range(version - stages.keep_versions + 1, version + 1))

    def _count_step(self, version: int, metrics: Mapping[str, float]) -> None:
        progress = self.progress
        progress.rewards.append(metrics["reward_mean"])
        progress.tokens_trained += int(metrics["num_entries"])
        progress.staleness = int(metrics["staleness_max"])
        progress.max_staleness_seen = max(progress.max_staleness_seen, progress.staleness)
        self._count_outstanding()
        log_event(log, logging.INFO, "step", run_id=self.run_id, version=version, reward=metrics["reward_mean"])

    # ---- evaluation -------------------------------------------------------------------------------------------------------------------

    def _is_evaluation_due(self, version: int) -> bool:
        evaluation = self.config.evaluation
        is_end = version in (0, self._algorithm.steps)
        is_planned = evaluation.num_tasks > 0 and (is_end or (evaluation.every > 0 and version % evaluation.every == 0))
        return is_planned and version not in self.progress.evaluations

    async def _evaluate_soon(self, version: int) -> None:
        """Start an evaluation beside training; the version is pinned before anything newer can be published."""
        await self._on_device(lambda: self._stages.sampler.pin(self.run_id, version), f"pin version {version}")
        self._spawn(partial(self._evaluate_pinned, version), self._evaluating)

    async def _evaluate_pinned(self, version: int) -> None:
        try:
            await self._evaluate(version)
        finally:
            with suppress(StageStoppedError):
                self._stages.device.call(lambda: self._stages.sampler.unpin(self.run_id, version))

    async def _evaluate(self, version: int) -> None:
        tasks = held_out_tasks(self._rules.environment, self.config.evaluation.num_tasks)
        result: EvaluationResult = await self._stages.pool.evaluate(self._rules, tasks, version=version)
        row = store.EvaluationRow(version, result.accuracy, result.mean_reward, len(tasks), result.num_failed)
        now_s = self._stages.clock.wall()
        await self._stages.buffer.transaction(lambda connection: store.add_evaluation(connection, self.run_id, row, now_s))
        self.progress.evaluations[version] = result.accuracy

    # ---- end --------------------------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._stages.buffer.drop_run(self.run_id, "stopped")
        self._outstanding.clear()
        self._release()
        await self._set_status(store.FINISHED, self.progress.message)
        if not self._done.done():
            self._done.set_result(None)

    def _release(self) -> None:
        """Give the run's slots in learner and sampler back."""
        self._stages.learner.unload_run(self.run_id)
        with suppress(StageStoppedError):
            self._stages.device.call(lambda: self._stages.sampler.retire(self.run_id))

    async def _wait_for(self, future: "Future[T]", timeout_s: float, what: str) -> T:
        return await self._stages.clock.wait_for(asyncio.wrap_future(future), timeout_s, f"run {self.run_id}: {what}")

    async def _on_device(self, function: Callable[[], T], what: str) -> T:
        return await self._wait_for(self._stages.device.call(function), self.config.deadlines.publish_s, what)

    async def _set_status(self, status: str, message: str) -> None:
        self.progress.status, self.progress.message = status, message
        await self._stages.buffer.transaction(lambda connection: store.set_status(connection, self.run_id, status, message))

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], owner: set[asyncio.Task[None]]) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._guard(work))
        owner.add(task)
        task.add_done_callback(owner.discard)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one of the run's tasks; what it raises makes the run fail, with its cause, and nobody else's."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this run, recorded and with its cause, and no other
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        if self._done.done():
            return
        code = error.code if isinstance(error, NoriaError) else "internal_error"
        self._done.set_exception(error)
        self._done.exception()  # whoever waits sees it; nobody has to
        log.error("run failed", exc_info=error, extra={"fields": {"run_id": self.run_id, "code": code, "error": str(error)}})
        for task in (self._tasks | self._evaluating) - {asyncio.current_task()}:
            task.cancel()
        self._release()
        await self._set_status(store.FAILED, f"{code}: {error}")

    def _change(self) -> None:
        """Something happened that a waiting task may wait for."""
        self._count_outstanding()
        self._generation += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change_since(self, seen: int) -> None:
        """Return once something has changed since generation `seen`, which was read before the state that made the caller wait."""
        while self._generation == seen:
            await self._changed.wait()

    def _count_outstanding(self) -> None:
        self.progress.num_outstanding = len(self._outstanding)


def _step_metrics(groups: list[EpisodeGroup], statistics: BatchStatistics, result: StepResult, staleness: list[int]) -> dict[str, float]:
    """What is stored with the version: plain numbers."""
    return {
        **result.metrics,
        "grad_norm": result.grad_norm,
        "reward_mean": statistics.reward_mean,
        "reward_std": statistics.reward_std,
        "num_groups_without_signal": statistics.num_groups_without_signal,
        "num_truncated": statistics.num_truncated,
        "num_failed": statistics.num_failed,
        "completion_length_mean": statistics.completion_length_mean,
        "num_positions": result.num_positions,
        "num_positions_unshared": statistics.num_positions_unshared,
        "tokens_sampled": sum(e.num_sampled for g in groups for e in g.episodes),
        "staleness_max": max(staleness, default=0),
        "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "device_s": result.device_s,
    }
