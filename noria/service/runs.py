"""One run's life: brought up from the store, on its way, ended. What it does meanwhile are tasks that wait for data and for nothing else:

    admission   a place is free and a task is left       ──▶ lease ──▶ actors play the group ──▶ buffer      (service/admission.py)
    training    examples, then groups within the bound   ──▶ tree ──▶ learner ──▶ commit ──▶ publish         (service/training.py, versions.py)
    evaluation  a version is due                         ──▶ actors play held-out tasks at that pinned version (service/evaluations.py)

A run ends in one way, `_end`: its tasks let go, its slots are given back, its status is stored, and only then does anybody hear of it.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import final

from sqlalchemy import Connection

from noria.actors.rules import EpisodeRules
from noria.buffer import life
from noria.config import RunConfig
from noria.errors import (
    AdapterFileCorruptError,
    DeadlineExceededError,
    NoriaError,
    StageStoppedError,
    UnknownVersionError,
)
from noria.learner.operations import RunSpec
from noria.model.lora import AdapterState
from noria.observe import log_event
from noria.service import store
from noria.service.admission import Admission, read_newest_trained, read_without_signal
from noria.service.evaluations import Evaluations
from noria.service.progress import RunProgress, RunState
from noria.service.stages import Stages
from noria.service.supervised import NO_EXAMPLES
from noria.service.tasks import RunTasks
from noria.service.training import Training
from noria.service.versions import Versions
from noria.text.examples import ExampleFile
from noria.types import AdapterVersion

log = logging.getLogger(__name__)


@final
class ActiveRun:
    """Owner of one run's life on the event loop. `start` brings it up from the store, `finished` waits for its end, `stop` lets go."""

    def __init__(self, config: RunConfig, rules: EpisodeRules, stages: Stages, initial: AdapterState, examples: ExampleFile = NO_EXAMPLES) -> None:
        """initial: the state of version 0, used unless the store has a newer one. examples: of the supervised phase, if it is not over."""
        self.config = config
        self._rules, self._stages, self._initial, self._examples = rules, stages, initial, examples
        self._tasks = RunTasks(self._fail)
        self._state = RunState(config, rules, stages, self._tasks)
        self._evaluations = Evaluations(config, rules, stages, self._tasks.spawn)
        self._versions = Versions(self._state, self._evaluations)
        self._admission = Admission(self._state)
        self._training = Training(self._state, self._admission, self._versions, self._evaluations, examples.examples)
        self.progress.evaluations = self._evaluations.accuracy
        self._ending: asyncio.Task[None] | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def run_id(self) -> str:
        """The run's name, unique in its server."""
        return self.config.name

    @property
    def progress(self) -> RunProgress:
        """How far it is."""
        return self._state.progress

    async def start(self) -> None:
        """Create the run, or bring it up at its newest committed version, and start its tasks. Nothing of a new run that is refused is stored.

        Raises StateConflictError (known with another configuration), AdapterFileCorruptError, PublishProofError, DeadlineExceededError,
        StageStoppedError. Then the run has ended, and what it held is given back.
        """
        buffer = self._stages.buffer
        try:
            rows = await buffer.transaction(lambda connection: store.versions(connection, self.run_id))
            await (self._resume(rows) if rows else self._create())
            leases = await buffer.recover(self.run_id, version=self.progress.version, deadline_s=self._admission.group_deadline_s())
            waiting = await buffer.outstanding(self.run_id)
            dull = await buffer.transaction(lambda connection: read_without_signal(connection, self.run_id))
            trained = await buffer.transaction(lambda connection: read_newest_trained(connection, self.run_id))
            await self._check_alive()
        except BaseException as error:
            await self._end(store.STOPPED, "", StageStoppedError(f"run {self.run_id} was not started: {error}"))
            raise
        self._admission.recover(leases, dull)
        self._training.recover(sum(admission > trained for admission in dull))
        self._state.admitted(item.group_id for item in waiting)
        self._tasks.spawn(self._admission.run)
        self._tasks.spawn(self._train)

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
        if self._state.is_up and self._ending is None:
            self._tasks.spawn(lambda: self._fail(error))

    # ---- start ------------------------------------------------------------------------------------------------------------------------

    async def _create(self) -> None:
        """Claim room in learner and sampler and prove version 0 there; only then is anything stored."""
        await self._load(self._initial)
        await self._versions.create(self._initial, self._register, examples_sha256=self._examples.sha256 or None)

    async def _resume(self, rows: Sequence[store.VersionRow]) -> None:
        """Bring the newest committed version up, and before it, in their order, the older ones whose evaluation a death or a stop cut short."""
        stages, newest = self._stages, rows[-1].record
        await stages.buffer.transaction(self._register)
        self._evaluations.restore(await stages.buffer.transaction(lambda connection: store.evaluations(connection, self.run_id)))
        state = await asyncio.to_thread(stages.files.load, newest, stages.width_of(self.config))
        await self._load(state)
        pending = self._evaluations.pending(newest.version)
        for row in rows[:-1]:
            if row.record.version in pending:
                await self._evaluate_older(row.record)
        await self._versions.publish(newest, state)
        await self._tasks.durably(self._versions.retain(newest.version))
        for row in rows[1:]:
            self._state.count_step(row.record.version, row.metrics)
        self.progress.version = newest.version
        await self._check_alive()
        self._state.is_up = True
        await self._set_status(store.RUNNING, "")

    async def _evaluate_older(self, record: AdapterVersion) -> None:
        """Begin the evaluation of a version that is not the newest. If its files are lost it stays without one, and the run resumes."""
        stages = self._stages
        try:
            state = await asyncio.to_thread(stages.files.load, record, stages.width_of(self.config))
        except (UnknownVersionError, AdapterFileCorruptError) as error:
            log_event(log, logging.ERROR, "evaluation lost", run_id=self.run_id, version=record.version, error=str(error))
            return
        timeout_s = self.config.deadlines.publish_s
        await stages.publisher.publish_older(record, state.params, self.config.adapter.lora, timeout_s=timeout_s)
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
                self.config.algorithm.num_places,
                self.config.actors.task_tries,
                position=0,
                num_admitted=0,
                num_skipped=0,
            ),
        )

    async def _load(self, state: AdapterState) -> None:
        config = self.config
        self._stages.weights.join(config)
        spec = RunSpec(self.run_id, config.lora, config.optimizer, config.algorithm.loss_spec, config.weight)
        await self._state.wait_for(self._stages.learner.load_run(spec, state), config.deadlines.publish_s, "load the run")

    async def _train(self) -> None:
        await self._training.run()
        await self._end(store.FINISHED, self.progress.message, None)

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
                self._state.all_settled()
            if self._state.is_up:
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
        try:
            await self._tasks.cancel(self._stages.clock, self.config.deadlines.drain_s, f"run {self.run_id}: what it has under way")
        except DeadlineExceededError as error:
            log_event(log, logging.ERROR, "run did not let go in time", run_id=self.run_id, error=str(error))

    def _release(self) -> None:
        """Give the run's slots in learner and sampler back, and its weight."""
        self._evaluations.release()
        self._stages.learner.unload_run(self.run_id)
        self._stages.soon_on_device(lambda: self._stages.sampler.retire(self.run_id))
        self._stages.weights.leave(self.run_id)
        self._stages.pool.forget(self.run_id)

    async def _set_status(self, status: str, message: str) -> None:
        self.progress.status, self.progress.message = status, message
        await self._stages.buffer.transaction(lambda connection: store.set_status(connection, self.run_id, status, message))

    async def _fail(self, error: Exception) -> None:
        if self._ending is not None:  # which waits for this very task
            return
        code = error.code if isinstance(error, NoriaError) else "internal_error"
        log.error("run failed", exc_info=error, extra={"fields": {"run_id": self.run_id, "code": code, "error": str(error)}})
        await self._end(store.FAILED, f"{code}: {error}", error)
