"""One run on its way: its actors' groups in, its optimizer steps out. Three tasks that wait for data and for nothing else.

    admission   a place is free and a task is left       ──▶ lease ──▶ actors play the group ──▶ buffer
    training    a batch can be formed within the bound   ──▶ tree ──▶ learner ──▶ commit ──▶ publish ──▶ places are free
    evaluation  a version is due                         ──▶ actors play held-out tasks greedily at that pinned version (service/evaluations.py)

A step's commit is: files, then one transaction with the version and the settled groups. Once begun it is finished, whoever is cancelled meanwhile.
Only then is the version published, and only after that is the next group admitted, so that no group ever samples a version that its place does not
account for. A run ends in one way, `_end`: its tasks let go, its slots are given back, its status is stored, and only then does anybody hear of it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

from sqlalchemy import Connection

from noria.actors.group import GroupOutcome
from noria.actors.rules import EpisodeRules
from noria.buffer import life
from noria.config import RunConfig
from noria.errors import (
    AdapterFileCorruptError,
    DeadlineExceededError,
    NoriaError,
    RunFailedError,
    SlotsExhaustedError,
    StageStoppedError,
    UnknownVersionError,
)
from noria.learner.learner import RunSpec, StepResult
from noria.model.lora import AdapterState, checksum
from noria.observe import log_event
from noria.protocols import Lease
from noria.rl.staleness import beyond_bound, form_batch
from noria.service import store
from noria.service.batch import Batch, prepare, step_metrics
from noria.service.evaluations import Evaluations, Work
from noria.service.stages import Stages
from noria.types import AdapterVersion, DropReason, EpisodeGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

REWARD_WINDOW = 5
"""Steps of the moving reward that reports and the live table show."""


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
        self._algorithm, self._deadlines = config.algorithm, config.deadlines
        self._evaluations = Evaluations(config, rules, stages, self._spawn)
        self.progress.evaluations = self._evaluations.accuracy
        self._outstanding: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._durable: set[asyncio.Task[Any]] = set()
        self._generation = 0
        self._changed = asyncio.Event()
        self._admission = asyncio.Lock()
        self._is_up = False
        self._ending: asyncio.Task[None] | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failures_in_a_row = 0
        self._batches_without_signal = 0
        self._recovered: deque[Lease] = deque()

    @property
    def run_id(self) -> str:
        """The run's name, unique in its server."""
        return self.config.name

    async def start(self) -> None:
        """Create the run, or bring it up at its newest committed version, and start its tasks. Nothing of a new run that is refused is stored.

        Raises StateConflictError (known with another configuration), AdapterFileCorruptError, SlotsExhaustedError (no room in learner or sampler),
        PublishProofError, DeadlineExceededError, StageStoppedError. Then the run has ended, and what it held is given back.
        """
        try:
            rows = await self._stages.buffer.transaction(lambda connection: store.versions(connection, self.run_id))
            await (self._resume(rows) if rows else self._create())
            leases = await self._stages.buffer.recover(self.run_id, version=self.progress.version, deadline_s=self._group_deadline())
            waiting = await self._stages.buffer.outstanding(self.run_id)
            await self._check_alive()
        except BaseException as error:
            await self._end(store.STOPPED, "", StageStoppedError(f"run {self.run_id} was not started: {error}"))
            raise
        self._recovered.extend(leases)
        self._outstanding.update(item.group_id for item in waiting)
        self._count_outstanding()
        self._spawn(self._admit_groups)
        self._spawn(self._train)

    async def finished(self) -> None:
        """Wait for the run's end. Raises what made it fail: RunFailedError, PublishProofError, GradientNotFiniteError, StageStoppedError, ..."""
        await asyncio.shield(self._done)

    async def stop(self) -> None:
        """Cancel what is under way and let go; all that is committed stays, and the run can be resumed. Idempotent.

        A commit or a file operation that has begun is finished first.
        """
        await self._end(store.STOPPED, "", StageStoppedError(f"run {self.run_id} was stopped at version {self.progress.version}"))

    def fail(self, error: Exception) -> None:
        """End the run with `error`, soon. Nothing if it has ended, or is still starting: then whatever it waits for fails by itself."""
        if self._is_up and self._ending is None:
            self._spawn(partial(self._fail, error))

    # ---- start ------------------------------------------------------------------------------------------------------------------------

    async def _create(self) -> None:
        """Claim room in learner and sampler and prove version 0 there; only then is anything stored."""
        initial = self._initial
        await self._load(initial)
        unwritten = AdapterVersion(self.run_id, 0, checksum(initial.params), moments_checksum=0, path="")
        await self._publish(unwritten, initial)
        await self._durably(self._commit_first())

    async def _commit_first(self) -> None:
        record = await asyncio.to_thread(self._stages.files.write, self.run_id, 0, self._initial, self.config.adapter.rank)

        def commit(connection: Connection) -> None:
            now_s = self._stages.clock.wall()
            store.create_run(connection, self.config, now_s)
            store.add_version(connection, record, {}, now_s)
            self._register(connection)

        await self._stages.buffer.transaction(commit)
        self._is_up = True

    async def _resume(self, rows: Sequence[store.VersionRow]) -> None:
        """Bring the newest committed version up, and before it, in their order, the older ones whose evaluation a death or a stop cut short."""
        stages, newest = self._stages, rows[-1].record
        await stages.buffer.transaction(self._register)
        for evaluation in await stages.buffer.transaction(lambda connection: store.evaluations(connection, self.run_id)):
            self._evaluations.accuracy[evaluation.version] = evaluation.accuracy
        state = await asyncio.to_thread(stages.files.load, newest, stages.max_rank)
        await self._load(state)
        pending = self._evaluations.pending(newest.version)
        for row in rows[:-1]:
            if row.record.version in pending:
                await self._evaluate_older(row.record)
        await self._publish(newest, state)
        await self._durably(asyncio.to_thread(stages.files.keep_only, self.run_id, self._kept(newest.version)))
        for row in rows[1:]:
            self._count_step(row.record.version, row.metrics)
        self._seen_version(newest.version)
        await self._check_alive()
        self._is_up = True
        await self._set_status(store.RUNNING, "")

    async def _evaluate_older(self, record: AdapterVersion) -> None:
        """Begin the evaluation of a version that is not the newest. If its files are lost it stays without one, and the run resumes."""
        stages = self._stages
        try:
            state = await asyncio.to_thread(stages.files.load, record, stages.max_rank)
        except (UnknownVersionError, AdapterFileCorruptError) as error:
            log_event(log, logging.ERROR, "evaluation lost", run_id=self.run_id, version=record.version, error=str(error))
            return
        await stages.publisher.publish_older(record, state.params, self.config.adapter.lora, timeout_s=self._deadlines.publish_s)
        await self._evaluations.begin(record.version)

    async def _check_alive(self) -> None:
        """Raises what ended the run while it started: an evaluation that failed, or a stage."""
        if self._ending is not None:
            await self.finished()

    def _register(self, connection: Connection) -> None:
        """The run's cursor and places in the buffer."""
        life.register_run(
            connection,
            life.Cursor(
                self.run_id,
                self.config.seed,
                self._rules.environment.num_tasks,
                self._algorithm.num_places,
                self.config.actors.task_tries,
                position=0,
                num_admitted=0,
                num_skipped=0,
            ),
        )

    async def _load(self, state: AdapterState) -> None:
        config = self.config
        self._stages.weights.join(config)
        spec = RunSpec(self.run_id, config.adapter.lora, config.adapter.optimizer, self._algorithm.loss, config.weight)
        await self._wait_for(self._stages.learner.load_run(spec, state), self._deadlines.publish_s, "load the run")

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
            self._spawn(partial(self._play, lease))

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
        return self._stages.clock.wall() + self._deadlines.episode_s * tries

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
        log_event(log, logging.WARNING, "group dropped", run_id=self.run_id, group_id=group_id, reason=reason, error=why)
        limit = self.config.actors.max_failed_groups
        if self._failures_in_a_row >= limit:
            raise RunFailedError(f"run {self.run_id}: {limit} groups in a row failed; the last one with {why}")

    # ---- training ---------------------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        await self._evaluations.begin(self.progress.version)
        while self.progress.version < self._algorithm.steps:
            groups = await self._next_batch()
            if not await self._step(groups):
                break
            await self._evaluations.begin(self.progress.version)
        await self._evaluations.finish()
        await self._end(store.FINISHED, self.progress.message, None)

    async def _next_batch(self) -> list[EpisodeGroup]:
        while True:
            seen = self._generation
            waiting = await self._stages.buffer.outstanding(self.run_id)
            rule = {"version": self.progress.version, "max_staleness": self._algorithm.max_staleness}
            for group_id in beyond_bound(waiting, **rule):  # never by these rules; it would hold its place for ever
                await self._give_up(group_id, "stale", "its oldest token is beyond max_staleness")
            chosen = form_batch(waiting, **rule, groups_per_batch=self._algorithm.groups_per_batch)
            if chosen is not None:
                return await self._stages.buffer.lease(self.run_id, chosen)
            with self._stages.spans.span("learner", "batch", self.run_id, is_wait=True):
                await self._change_since(seen)

    async def _step(self, groups: list[EpisodeGroup]) -> bool:
        """Train one batch; whether the run goes on."""
        try:
            batch = await asyncio.to_thread(prepare, groups, self._algorithm, self._stages.shape)
            result = await self._compute(batch) if batch.pieces else None
        except (StageStoppedError, DeadlineExceededError):
            raise
        except Exception:  # or every restart would take the same batch again, and fail again
            await self._durably(self._settle_dropped(groups, "failed"))
            raise
        if result is None:
            return await self._settle_untrained(batch)
        self._batches_without_signal = 0
        metrics = step_metrics(batch, result, self.progress.version)
        async with self._admission:
            record = await self._durably(self._commit(batch, result, metrics))
            await self._publish(record, result.state)
            self._seen_version(record.version)
        self._change()
        return True

    async def _compute(self, batch: Batch) -> StepResult:
        training = self._stages.learner.train(self.run_id, batch.pieces)
        return await self._wait_for(training, self._deadlines.train_s, f"train the step after version {self.progress.version}")

    async def _settle_untrained(self, batch: Batch) -> bool:
        await self._durably(self._settle_dropped(batch.groups, "no_signal"))
        self._batches_without_signal += 1
        self._change()
        if self._batches_without_signal < self._algorithm.max_batches_without_signal:
            return True
        statistics = batch.statistics
        self.progress.message = (
            f"stopped early: {self._batches_without_signal} batches in a row had nothing to train; of the last one, "
            f"{statistics.num_groups_without_signal} of {statistics.num_groups} groups had equal rewards and "
            f"{statistics.num_truncated} of {statistics.num_episodes} episodes were cut by max_tokens"
        )
        return False

    async def _settle_dropped(self, groups: Sequence[EpisodeGroup], reason: DropReason) -> None:
        ids = [g.group_id for g in groups]
        await self._stages.buffer.transaction(lambda connection: self._stages.buffer.settle_dropped(connection, ids, reason))
        self._outstanding.difference_update(ids)

    async def _commit(self, batch: Batch, result: StepResult, metrics: Mapping[str, float]) -> AdapterVersion:
        """Files, then the transaction that is the point of no return: the version, and every group settled as what became of it."""
        stages, version = self._stages, self.progress.version + 1
        record = await asyncio.to_thread(stages.files.write, self.run_id, version, result.state, self.config.adapter.rank)

        def commit(connection: Connection) -> None:
            store.add_version(connection, record, metrics, stages.clock.wall())
            stages.buffer.settle_trained(connection, batch.trained, version)
            stages.buffer.settle_dropped(connection, batch.untrained, "no_signal")

        await stages.buffer.transaction(commit)
        self._outstanding.difference_update(batch.trained, batch.untrained)
        self._count_step(version, metrics)
        await asyncio.to_thread(stages.files.keep_only, self.run_id, self._kept(version))
        return record

    async def _publish(self, record: AdapterVersion, state: AdapterState) -> None:
        """Publish what the learner holds. Without a free slot in time, the run's own evaluation is waited for: then its newest version's slot is."""
        lora, timeout_s = self.config.adapter.lora, self._deadlines.publish_s
        while True:
            may_wait = self._evaluations.is_under_way
            try:
                return await self._stages.publisher.publish(record, state.params, lora, timeout_s=timeout_s)
            except SlotsExhaustedError:
                if not may_wait:
                    raise

    def _kept(self, newest: int) -> set[int]:
        """Versions that stay on disk."""
        return {*range(newest - self._stages.keep_versions + 1, newest + 1), *self._evaluations.pending(newest)}

    def _count_step(self, version: int, metrics: Mapping[str, float]) -> None:
        progress = self.progress
        progress.rewards.append(metrics["reward_mean"])
        progress.tokens_trained += int(metrics["num_entries"])
        progress.staleness = int(metrics["staleness_max"])
        progress.max_staleness_seen = max(progress.max_staleness_seen, progress.staleness)
        self._count_outstanding()
        log_event(log, logging.INFO, "step", run_id=self.run_id, version=version, reward=metrics["reward_mean"])

    # ---- end --------------------------------------------------------------------------------------------------------------------------

    async def _end(self, status: str, message: str, error: Exception | None) -> None:
        """End the run once; later calls wait for that end. error: what `finished` raises."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._let_go(status, message, error))
        await asyncio.shield(self._ending)

    async def _let_go(self, status: str, message: str, error: Exception | None) -> None:
        """Tasks, slots, status, in this order; then whoever waits for the end."""
        try:
            await self._cancel_tasks()
            self._release()
            if status == store.FINISHED:
                await self._stages.buffer.drop_run(self.run_id, "stopped")
                self._outstanding.clear()
                self._count_outstanding()
            if self._is_up:
                await self._set_status(status, message)
        except Exception as failure:  # the end itself failed: recorded as the run's failure, and the others go on
            log.exception("run could not end in order", extra={"fields": {"run_id": self.run_id}})
            error = error or failure
        finally:
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)
                self._done.exception()  # whoever waits sees it; nobody has to

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        under_way = self._tasks | self._durable
        if under_way:
            try:
                await self._stages.clock.wait_for(asyncio.wait(under_way), self._deadlines.drain_s, f"run {self.run_id}: what it has under way")
            except DeadlineExceededError as error:
                log_event(log, logging.ERROR, "run did not let go in time", run_id=self.run_id, error=str(error))

    def _release(self) -> None:
        """Give the run's slots in learner and sampler back, and its weight."""
        self._evaluations.release()
        self._stages.learner.unload_run(self.run_id)
        self._stages.soon_on_device(lambda: self._stages.sampler.retire(self.run_id))
        self._stages.weights.leave(self.run_id)
        self._stages.pool.forget(self.run_id)

    async def _durably(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is finished even if its caller is cancelled; the run's end waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._durable.add(task)
        task.add_done_callback(self._durable.discard)
        return await asyncio.shield(task)

    async def _wait_for(self, future: "Future[T]", timeout_s: float, what: str) -> T:
        return await self._stages.clock.wait_for(asyncio.wrap_future(future), timeout_s, f"run {self.run_id}: {what}")

    async def _set_status(self, status: str, message: str) -> None:
        self.progress.status, self.progress.message = status, message
        await self._stages.buffer.transaction(lambda connection: store.set_status(connection, self.run_id, status, message))

    def _spawn(self, work: Work) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Work) -> None:
        """Run one of the run's tasks; what it raises makes the run fail, with its cause, and nobody else's."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this run, recorded and with its cause, and no other
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        if self._ending is not None:  # which waits for this very task
            return
        code = error.code if isinstance(error, NoriaError) else "internal_error"
        log.error("run failed", exc_info=error, extra={"fields": {"run_id": self.run_id, "code": code, "error": str(error)}})
        await self._end(store.FAILED, f"{code}: {error}", error)

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
