"""The learner: continuous training batching of many runs on one resident base.

    forward_backward, optim_step, ... ──▶ inbox ──▶ each run's queue ──fair order──▶ microbatch ──▶ score ──▶ loss ──▶ pull
    (any thread; a future each)                                   │                 (pieces of whichever runs are ready)
                                                                  ├──▶ a visit of a walk, for a tree that fits in no microbatch
                                                                  └──▶ a barrier: an optimizer step, load, save

Each fixed-shape microbatch is filled with the pieces of whichever runs are ready; an operation's future completes when its own entries are done, and
no run waits for another's batch. A run's pieces are executed in their canonical order, so its result does not depend on its neighbours. Losses and
optimizers are arrays: runs with different ones share a pass, and a new mixture compiles nothing. One `step` is one device dispatch, so that decoding
goes between; a microbatch is pulled in the very next one, and in between no run changes its slot.
The learner deliberately neither commits nor publishes: it hands results to whoever asked.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from noria.config import LearnerConfig
from noria.errors import (
    AdapterFileCorruptError,
    GradientNotFiniteError,
    NoriaError,
    OperationFailedError,
    StageStoppedError,
    StateConflictError,
)
from noria.learner.batches import BatchPlanner, PlannedBatch, sequence
from noria.learner.checks import Sizes, batch_of, check, check_seq, check_spec, check_state, cotangents_of, ids_of
from noria.learner.executors import Job, Owners
from noria.learner.inbox import Inbox, fail_future
from noria.learner.operations import (
    BatchResult,
    EntryOutputs,
    Forward,
    ForwardBackward,
    Load,
    Operation,
    OptimResult,
    OptimStep,
    Refused,
    RunSpec,
    Save,
    StepResult,
)
from noria.learner.optimizer import read_gradient
from noria.learner.passes import Passes
from noria.learner.queue import FairOrder
from noria.learner.run_queue import RunQueue
from noria.learner.submissions import AnyBatch, Submission, as_step
from noria.model.config import ModelConfig
from noria.model.lora import AdapterState, HostAdapter
from noria.protocols import Clock, Spans
from noria.types import FloatArray, Ids, LossSpec, OptimizerSpec

log = logging.getLogger(__name__)


@final
class Learner:
    """Owner of all training work. What submits: any thread. `has_work`, `step`, `fail`: the device thread.

    wake: called after work has arrived. max_stall_s: the longest dispatch that the planner aims for, by the measured seconds per position. spill_dir:
    a folder of its own for adapters that fit neither in slots nor in host memory. Raises ConfigError: too little memory, before any is taken.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        config: ModelConfig,
        settings: LearnerConfig,
        *,
        spans: Spans,
        clock: Clock,
        wake: Callable[[], None],
        max_stall_s: float,
        spill_dir: Path | None = None,
    ) -> None:
        self._clock = clock
        self._fair = FairOrder()
        self._passes = Passes(
            params, config, settings, spans=spans, clock=clock, charge=self._fair.charge, max_stall_s=max_stall_s, spill_dir=spill_dir
        )
        self._queues: dict[str, RunQueue] = {}
        self._busy: dict[str, RunQueue] = {}
        self._probes: deque[tuple[str, Ids, Future[FloatArray]]] = deque()
        self._has_probed = False
        self._apart: set[str] = set()
        self._inbox = Inbox(wake)
        self._sizes = Sizes(self.planner.shape, settings.path_positions, config.vocab_size, settings.has_values)
        self._num_groups = 0

    def warm_up(self) -> None:
        """Compile every program of the closed set, before the first step and before any run is loaded. Seconds per shape for deep models."""
        assert not self._queues, "warm up first"
        self._passes.warm_up()

    @property
    def planner(self) -> BatchPlanner:
        """What plans batches for this learner. Any thread."""
        return self._passes.planner

    @property
    def num_microbatches(self) -> int:
        """Microbatches so far."""
        return self._passes.num_microbatches

    # ---- any thread -------------------------------------------------------------------------------------------------------------------

    def load_run(self, spec: RunSpec, state: AdapterState) -> "Future[None]":
        """Take a run in, with its state. It needs no free slot: idle runs make room.

        The future raises StateConflictError (loaded already, rank above all classes, a state that is not one of this model).
        """
        return self._inbox.post(lambda: self._load(spec, state))

    def unload_run(self, run_id: str) -> "Future[None]":
        """Forget the run; what it has under way is given up (the futures raise StageStoppedError)."""
        return self._inbox.post(lambda: self._unload(run_id))

    def forward(
        self, run_id: str, batch: AnyBatch, loss: LossSpec | None = None, *, of_base: bool = False, seq: int | None = None
    ) -> "Future[BatchResult]":
        """Score a batch. loss: None for the run's own; evaluated for its metrics. of_base: see `operations.Forward`.

        seq: the operation's number in its run, for callers whose operations may come out of order: it waits until all smaller ones have come, from
        `RunSpec.first_seq` on (`skip` for one that never will). None: in the order of the calls.

        The future raises InvalidRequestError (no entries, an unknown loss, one that reads what the batch lacks, numbers that are out of range),
        TreeTooLargeError, StateConflictError (unknown run, a number that has come before), AdapterFileCorruptError (the run's state was on disk, and
        is damaged), OperationFailedError (on the device, out of memory say), StageStoppedError.
        """

        def operations(spec: RunSpec, planned: PlannedBatch) -> list[Operation]:
            return [Forward(planned, spec.loss if loss is None else loss, of_base)]

        return self._submit(Submission(run_id, operations, seq, batch))[0]

    def forward_backward(
        self, run_id: str, batch: AnyBatch, loss: LossSpec | None = None, *, cotangents: EntryOutputs | None = None, seq: int | None = None
    ) -> "Future[BatchResult]":
        """Score a batch and add its gradient to the run's pending one. cotangents: by entry, in place of a loss's. seq, errors: as `forward`."""

        def operations(spec: RunSpec, planned: PlannedBatch) -> list[Operation]:
            given = None if cotangents is None else cotangents_of(cotangents, planned, self._sizes)
            return [ForwardBackward(planned, spec.loss if loss is None else loss, given)]

        return self._submit(Submission(run_id, operations, seq, batch, is_part_of_step=True))[0]

    def optim_step(self, run_id: str, optimizer: OptimizerSpec | None = None, *, seq: int | None = None) -> "Future[OptimResult]":
        """One optimizer step from all that was submitted before. optimizer: None for the run's own. seq: as `forward`.

        The future raises GradientNotFiniteError, StateConflictError (also if a forward_backward since the last step failed), and as `forward`. In any
        case the adapter stays as it was then, and the pending gradient is cleared.
        """
        return self._submit(Submission(run_id, lambda spec, _: [OptimStep(spec.optimizer if optimizer is None else optimizer)], seq))[0]

    def load(self, run_id: str, state: AdapterState, *, seq: int | None = None) -> "Future[None]":
        """Replace the run's state, in its turn. The future raises StateConflictError (unknown run, a state that is not one of this model)."""
        return self._submit(Submission(run_id, lambda _spec, _: [Load(state)], seq))[0]

    def save(self, run_id: str, *, seq: int | None = None) -> "Future[AdapterState]":
        """The run's state after all that was submitted before. seq, errors: as `forward`."""
        return self._submit(Submission(run_id, lambda _spec, _: [Save()], seq))[0]

    def train(self, run_id: str, batch: AnyBatch, *, loss: LossSpec | None = None, optimizer: OptimizerSpec | None = None) -> "Future[StepResult]":
        """forward_backward, optim_step and save in one. The future raises what each of them raises: then no gradient is pending."""

        def operations(spec: RunSpec, planned: PlannedBatch) -> list[Operation]:
            step = OptimStep(spec.optimizer if optimizer is None else optimizer)
            return [ForwardBackward(planned, spec.loss if loss is None else loss), step, Save()]

        return as_step(run_id, self._submit(Submission(run_id, operations, None, batch, num_operations=3)))

    def skip(self, run_id: str, seq: int) -> "Future[None]":
        """The operation of this number will never come: none waits for it. The future raises StateConflictError: unknown run, or it has come."""
        return self._inbox.post(lambda: self._append(self._queue(run_id), [], [], seq))

    def score_ids(self, run_id: str, ids: Ids) -> "Future[FloatArray]":
        """learner_logprobs of ids[1:] given what precedes each, temperature 1, by the run's adapter as it is now: float32 [len(ids) - 1]. Waits for
        nothing that is queued.

        The future raises StateConflictError (unknown run), InvalidRequestError (fewer than 2 ids, ids outside the vocabulary), TreeTooLargeError.
        """
        future: Future[FloatArray] = Future()
        return self._inbox.post(lambda: self._add_probe(run_id, ids, future), future)

    def pending_gradient(self, run_id: str) -> "Future[HostAdapter]":
        """A copy of the gradient that the run's next optimizer step would take, as it is now. The future raises StateConflictError (unknown run)."""
        return self._inbox.post(lambda: self._read_gradient(run_id))

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._inbox or self._busy or self._probes or self._passes.scored)

    # ---- the device thread ------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One device dispatch: the pull of what the last one scored, a probe, a barrier that is due, or whatever is next in fair order."""
        if self._passes.scored is not None:
            self._visited(self._passes.pull().owners)
            return True
        if (walk := self._passes.walks.halfway) is not None:
            self._alone(self._queues[walk.run_id], walk.job)
            return True
        did_work = self._inbox.drain(lambda: self._passes.is_intact)
        ready = [run_id for run_id, queue in self._busy.items() if not self._is_blocked(queue)]
        if self._probes and not (self._has_probed and ready):  # probes wait for nothing queued, but every other dispatch is not theirs
            self._has_probed = True
            self._probe(*self._probes.popleft())
            return True
        self._has_probed = False
        if due := next((queue for queue in self._busy.values() if queue.is_due), None):
            self._barrier(due)
        elif ready:
            self._fair.quantum = self._passes.pace.quantum_flops
            self._next(self._fair.order(ready))
        else:
            return did_work
        return True

    def fail(self, error: BaseException) -> None:
        """Fail all work, now and later, with StageStoppedError from `error`."""
        self._inbox.close(error)
        for *_, future in self._probes:
            fail_future(future, self._inbox.stopped())
        for queue in self._queues.values():
            queue.fail(self._inbox.stopped())
        self._probes.clear()
        self._busy.clear()
        self._passes.scored = None
        self._passes.walks.clear()

    def _submit(self, given: Submission) -> list["Future[Any]"]:
        """Queue operations that fail together. Batches are planned on this thread, off the device."""
        futures: list[Future[Any]] = [Future() for _ in range(given.num_operations)]
        try:
            planned = None if given.batch is None else self._planned(given.batch)
        except Exception as error:  # noqa: BLE001 - the caller's failure, handed back to it
            for future in futures:
                future.set_exception(error)
            self._inbox.post(partial(self._refuse, given, error))
            return futures
        self._inbox.post(lambda: self._enqueue(given, planned, futures), *futures)
        return futures

    def _planned(self, batch: AnyBatch) -> PlannedBatch:
        return batch_of(batch, self.planner, self._sizes)

    # ---- commands ---------------------------------------------------------------------------------------------------------------------

    def _load(self, spec: RunSpec, state: AdapterState) -> None:
        check_spec(spec)
        check_state(state)
        if spec.run_id in self._queues:
            raise StateConflictError(f"run {spec.run_id} is loaded already")
        self._passes.residency.add(spec.run_id, spec.lora, state)
        self._queues[spec.run_id] = RunQueue(spec, state.num_steps)

    def _unload(self, run_id: str) -> None:
        queue = self._queues.pop(run_id, None) if isinstance(run_id, str) else None
        if queue is None:
            return
        self._fail_run(queue, StageStoppedError(f"run {run_id} was stopped"))
        self._fair.forget(run_id)
        self._apart.discard(run_id)
        self._passes.residency.remove(run_id)

    def _fail_run(self, queue: RunQueue, error: BaseException) -> None:
        """Everything that the run has queued fails with `error`; nobody else's does."""
        self._passes.walks.end(queue.spec.run_id)
        queue.fail(error)
        self._rest(queue)

    def _rest(self, queue: RunQueue) -> None:
        """Nothing more of the run, if its queue is empty."""
        if not len(queue) and self._busy.pop(queue.spec.run_id, None) is not None:
            self._fair.deactivate(queue.spec.run_id)

    def _enqueue(self, given: Submission, planned: PlannedBatch | None, futures: Sequence["Future[Any]"]) -> None:
        queue = self._queue(given.run_id)
        try:
            made = given.operations(queue.spec, planned)
            for operation in made:
                check(operation, given.run_id, self._sizes)
        except Exception as error:
            self._refuse(given, error)
            raise
        self._append(queue, made, futures, given.seq)

    def _refuse(self, given: Submission, error: BaseException) -> None:
        """What was submitted failed before it was queued: nobody waits for its number, and a step that it was a part of will fail."""
        queue = self._queues.get(given.run_id) if isinstance(given.run_id, str) else None
        if queue is not None:
            refused = [Refused(error)] if given.is_part_of_step else []
            self._append(queue, refused, [Future() for _ in refused], given.seq)

    def _append(self, queue: RunQueue, operations: Sequence[Operation], futures: Sequence["Future[Any]"], seq: int | None) -> None:
        check_seq(seq)
        self._num_groups += 1
        queue.append(operations, futures, self._num_groups, seq=seq)
        if len(queue):
            self._busy[queue.spec.run_id] = queue
            self._fair.activate(queue.spec.run_id, queue.spec.weight)

    def _queue(self, run_id: str) -> RunQueue:
        queue = self._queues.get(run_id) if isinstance(run_id, str) else None
        if queue is None:
            raise StateConflictError(f"run {run_id} is not loaded")
        return queue

    def _read_gradient(self, run_id: str) -> HostAdapter:
        self._queue(run_id)
        residency = self._passes.residency
        slot = residency.bring([run_id])[run_id]
        return read_gradient(residency.slots(residency.class_of(run_id)), slot)

    def _add_probe(self, run_id: str, ids: Ids, future: "Future[FloatArray]") -> None:
        self._queue(run_id)
        ids = ids_of(ids, self._sizes)
        self.planner.plan([sequence(ids)])
        self._probes.append((run_id, ids, future))

    # ---- dispatches -------------------------------------------------------------------------------------------------------------------

    def _probe(self, run_id: str, ids: Ids, future: "Future[FloatArray]") -> None:
        try:
            future.set_result(self._passes.probe(run_id, ids))
        except (StateConflictError, AdapterFileCorruptError) as error:
            fail_future(future, error)

    def _is_blocked(self, queue: RunQueue) -> bool:
        """Whether the run waits for room for its walk."""
        job, walks = queue.job, self._passes.walks
        return job is not None and job.batch.walk is not None and job.mode is not None and queue.spec.run_id not in walks and not walks.has_room

    def _next(self, order: Sequence[str]) -> None:
        """Serve the first run of `order`, and the others with what room it leaves."""
        queue = self._busy[order[0]]
        job = queue.job
        if job is None:
            self._barrier(queue)
            self._fair.end_turn(order[0])
        elif job.phase == "loss" or job.batch.walk is not None:
            self._alone(queue, job)
        else:
            self._score(order)

    def _alone(self, queue: RunQueue, job: Job) -> None:
        """A dispatch for one job: its loss over the whole batch, or a visit of its walk."""
        run_id = queue.spec.run_id
        slot_of = self._bring([run_id])
        if slot_of is None:
            return
        with self._failing({run_id: [job]}):
            if job.phase == "loss":
                self._passes.evaluate(run_id, job)
            else:
                self._passes.visit(run_id, job, slot_of[run_id])
        self._settle([queue])

    def _score(self, order: Sequence[str]) -> None:
        """The forward pass of the next microbatch."""
        order = order[:1] if order[0] in self._apart else [run_id for run_id in order if run_id not in self._apart]
        residency, most = self._passes.residency, self._passes.shapes[-1].num_tiles
        found = [self._busy[run_id].offer(residency.class_of(run_id), most=most) for run_id in order]
        offers = [each for each in found if each is not None]
        plan, owners = self._passes.plan(offers)
        jobs: dict[str, list[Job]] = {}
        for planned, (job, _) in zip(plan.pieces, owners, strict=True):
            jobs.setdefault(planned.run_id, []).append(job)
        slot_of = self._bring(list(jobs))
        if slot_of is None:
            return
        with self._failing(jobs):
            has_ended = self._passes.score(plan, owners, offers[0].offer.mode, slot_of)
            self._apart.difference_update(jobs)
            if has_ended:
                self._visited(owners)

    def _bring(self, run_ids: Sequence[str]) -> dict[str, int] | None:
        """Slots of these runs. None if one's state is lost: it has failed then, and the others are as they were."""
        residency = self._passes.residency
        try:
            return residency.bring(run_ids)
        except AdapterFileCorruptError:
            for run_id in run_ids:
                if error := residency.lost.get(run_id):
                    self._fail_run(self._queues[run_id], error)
            return None

    @contextmanager
    def _failing(self, jobs: Mapping[str, Sequence[Job]]) -> Iterator[None]:
        """What a dispatch raises is the failure of the jobs in it, recorded in their futures, unless it took the device's state with it.

        Runs that shared a dispatch are tried again one by one first: only one of them may be to blame.
        """
        try:
            yield
        except Exception as error:
            if not self._passes.is_intact:
                raise
            log.exception("a dispatch of runs %s failed", ", ".join(jobs))
            if len(jobs) > 1:
                self._apart.update(jobs)
                return
            self._apart.difference_update(jobs)
            failure = error if isinstance(error, NoriaError) else OperationFailedError(f"the learner could not execute it: {error!r}")
            failure.__cause__ = error.__cause__ if failure is error else error
            for run_id, failed in jobs.items():
                self._passes.walks.end(run_id)
                self._after_failure(self._queues[run_id], self._queues[run_id].fail_jobs(failed, failure))

    def _after_failure(self, queue: RunQueue, is_gradient_lost: bool) -> None:
        if is_gradient_lost:
            with suppress(AdapterFileCorruptError):  # a run whose state is lost has no gradient either
                self._passes.residency.clear_gradient(queue.spec.run_id)
        self._rest(queue)

    def _visited(self, owners: Owners) -> None:
        """A microbatch is done with."""
        for job, _ in owners:
            job.visited()
        self._settle(list(self._busy.values()))

    def _settle(self, queues: Sequence[RunQueue]) -> None:
        for queue in queues:
            if queue.settle():
                self._fair.end_turn(queue.spec.run_id)
                self._rest(queue)

    def _barrier(self, queue: RunQueue) -> None:
        operation, run_id = queue.barrier, queue.spec.run_id
        self._fair.charge(run_id, self._passes.costs.tile)
        try:
            match operation:
                case OptimStep(optimizer):
                    queue.finish_head(self._optimize(queue, optimizer))
                case Load(state):
                    self._passes.residency.load(run_id, state)
                    queue.num_steps = state.num_steps
                    queue.finish_head(None)
                case Save():
                    queue.finish_head(self._passes.residency.read(run_id))
                case Refused():
                    queue.finish_head(None)
        except Exception as error:  # whatever it is, it is this operation's failure, recorded in its future
            if not self._passes.is_intact:
                raise
            self._after_failure(queue, queue.fail_head(error))
        self._rest(queue)

    def _optimize(self, queue: RunQueue, optimizer: OptimizerSpec) -> OptimResult:
        run_id, start = queue.spec.run_id, self._clock.now()
        if queue.lacks is not None:
            raise StateConflictError(
                f"run {run_id}: no step after version {queue.num_steps}, since a forward_backward that it would have been taken from failed: "
                f"{queue.lacks}. Its pending gradient is cleared: submit all of the step's batches again"
            )
        grad_norm, learning_rate = self._passes.optimize(run_id, optimizer)
        if not np.isfinite(grad_norm):
            raise GradientNotFiniteError(
                f"run {run_id}: the gradient of the step after version {queue.num_steps} has norm {grad_norm}; the adapter is unchanged. "
                "Look at the batch's rewards and log-probabilities, or lower the learning rate"
            )
        queue.num_steps += 1
        return OptimResult(grad_norm, learning_rate, queue.num_steps, self._clock.now() - start)
