"""The learner: continuous training batching of many runs on one resident base.

    train(run, pieces) ──▶ inbox ──▶ jobs ──plan──▶ microbatch ──▶ score ──▶ cotangents ──▶ pull ──▶ ... ──▶ optimizer step of one run
                                       (pieces of whichever runs are ready)        (one device dispatch per `step`)

Each fixed-shape microbatch is filled with the pieces of whichever runs are ready; a run's optimizer step fires when its own batch is complete, and
no run waits for another's batch. A run's pieces are executed in their canonical order, so its result does not depend on its neighbours. Loss and
optimizer belong to the batch: arrays, so that runs with different ones share a pass, and a new mixture compiles nothing.
The learner deliberately neither commits nor publishes: it hands the new state to whoever called `train`, and starts no further batch of that run
until it is given one.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from noria.config import LearnerConfig
from noria.errors import (
    GradientNotFiniteError,
    InvalidRequestError,
    SlotsExhaustedError,
    StageStoppedError,
    StateConflictError,
    TreeTooLargeError,
)
from noria.learner.optimizer import Hyperparameters, SlotState, apply_step, empty_state, hyperparameters, load_slot, read_slot
from noria.learner.queue import FairOrder
from noria.learner.step import Arrays, Residuals, loss_cotangents, loss_inputs, pull, score, to_device
from noria.model.config import ModelConfig
from noria.model.lora import AdapterState, misfit
from noria.protocols import Clock, Spans
from noria.rl.losses import LossMetrics, LossTable, loss_table, run_metrics
from noria.rl.packing import MicrobatchPlan, PlannedPiece, ReadyRun, pack, plan_microbatch, shapes_up_to
from noria.types import TILE, Entries, FloatArray, Ids, LoraSpec, LossSpec, OptimizerSpec, Piece

_SCORED_RUN = "(score)"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the learner knows of a run. optimizer, loss: of its batches that bring none of their own. weight: its fair share relative to others."""

    run_id: str
    lora: LoraSpec
    optimizer: OptimizerSpec
    loss: LossSpec
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step. state: the run's new state on the host. metrics: of the loss, additive ones already divided by their counts.

    learning_rate: used by it. num_positions, num_entries: of the run's own pieces. device_s: device seconds of its microbatches (shared ones by
    tiles) and its optimizer step.
    """

    run_id: str
    state: AdapterState
    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    num_positions: int
    num_entries: int
    device_s: float


@dataclass(slots=True)
class _Run:
    spec: RunSpec
    slot: int
    hyper: Hyperparameters


@dataclass(slots=True)
class _Job:
    """A run's batch: pieces before `next_piece` are planned, those before `num_pulled` have added their gradient."""

    run: _Run
    pieces: Sequence[Piece]
    loss: LossSpec
    hyper: Hyperparameters
    future: "Future[StepResult]"
    next_piece: int = 0
    num_pulled: int = 0
    device_s: float = 0.0
    sums: LossMetrics | None = None

    @property
    def num_positions(self) -> int:
        return sum(len(piece.ids_T) for piece in self.pieces)


@dataclass(slots=True)
class _Scored:
    """A microbatch between score and pull."""

    plan: MicrobatchPlan
    arrays: Arrays
    residuals: Residuals
    cotangent_M: jax.Array


@final
class Learner:
    """Owner of all trainable state. `load_run`, `unload_run`, `train`, `score_ids`: any thread. `has_work`, `step`, `fail`: the device thread.

    wake: called after work has arrived. max_stall_s: the longest dispatch that the planner aims for, by the measured seconds per position.
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
    ) -> None:
        self._params, self._config, self._settings = params, config, settings
        self._spans, self._clock, self._wake, self._max_stall_s = spans, clock, wake, max_stall_s
        self._shapes = shapes_up_to(settings.max_positions)
        self._state: SlotState = empty_state(config, settings.num_slots, settings.max_rank)
        self._scale_A = np.zeros(settings.num_slots, np.float32)
        self._runs: dict[str, _Run] = {}
        self._free_slots = list(range(settings.num_slots))
        self._jobs: dict[str, _Job] = {}
        self._fair = FairOrder()
        self._scored: _Scored | None = None
        self._losses: LossTable = loss_table({}, settings.num_slots)
        self._seconds_per_position = 0.0
        self._seen_shapes: set[int] = set()
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._failure: BaseException | None = None
        self.num_microbatches = 0
        self.positions_useful = 0
        self.positions_dispatched = 0

    def warm_up(self) -> None:
        """Compile every program of the closed set, before the first step and before any run is loaded. Seconds per shape for deep models."""
        assert not self._runs, "warm up first"
        config, settings = self._config, self._settings
        for shape in self._shapes:
            microbatch = pack(MicrobatchPlan(shape, (PlannedPiece(_SCORED_RUN, 0, 0, _sequence((0, 0))),)))
            arrays, scale_A = to_device(microbatch), jnp.asarray(self._scale_A)
            outputs, residuals = score(self._params, self._state.params, scale_A, arrays, config)
            cotangent_M, _ = loss_cotangents(outputs, loss_inputs(microbatch), self._losses)
            accumulators = self._state.gradient
            gradient = pull(
                self._params, self._state.params, scale_A, arrays, residuals, cotangent_M=cotangent_M, accumulators=accumulators, config=config
            )
            self._state = self._state._replace(gradient=jax.block_until_ready(gradient))
            self._seen_shapes.add(shape.num_positions)
        self._state, *_ = apply_step(self._state, jnp.int32(0), hyperparameters(OptimizerSpec(1.0)))
        self._state = load_slot(self._state, 0, read_slot(self._state, 0))
        self._state = empty_state(config, settings.num_slots, settings.max_rank)

    # ---- any thread -------------------------------------------------------------------------------------------------------------------

    def load_run(self, spec: RunSpec, state: AdapterState) -> "Future[None]":
        """Give a run a slot and its state.

        The future raises SlotsExhaustedError, StateConflictError (loaded already, rank above the class, a state that is not one of this model).
        """
        return self._post(lambda: self._load(spec, state))

    def unload_run(self, run_id: str) -> "Future[None]":
        """Free the run's slot; a batch of it that is under way is given up (its future raises StageStoppedError)."""
        return self._post(lambda: self._unload(run_id))

    def train(
        self, run_id: str, pieces: Sequence[Piece], *, loss: LossSpec | None = None, optimizer: OptimizerSpec | None = None
    ) -> "Future[StepResult]":
        """One optimizer step on a batch cut into pieces (`rl.packing.cut`). loss, optimizer: of this batch; None: the run's own.

        The future raises InvalidRequestError (no entries, an unknown loss or schedule), TreeTooLargeError (a piece cut for a larger microbatch),
        StateConflictError (unknown run, or its previous batch is unfinished), GradientNotFiniteError (the adapter stays as it was),
        StageStoppedError.
        """
        future: Future[StepResult] = Future()
        self._post(lambda: self._submit(run_id, pieces, future, loss=loss, optimizer=optimizer), future)
        return future

    def score_ids(self, run_id: str, ids: Ids) -> "Future[FloatArray]":
        """learner_logprobs of ids[1:] given what precedes each, temperature 1, by the run's current adapter: float32 [len(ids) - 1].

        The future raises StateConflictError (unknown run), InvalidRequestError (fewer than 2 ids, ids outside the vocabulary), TreeTooLargeError.
        """
        return self._post(lambda: self._score_ids(run_id, ids))

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._inbox or self._jobs or self._scored)

    # ---- the device thread ------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One device dispatch: the pull of a scored microbatch, an optimizer step that is due, or the score of the next microbatch."""
        did_work = self._drain_inbox()
        if self._scored is not None:
            self._pull(self._scored)
        elif due := next((job for job in self._jobs.values() if job.num_pulled == len(job.pieces)), None):
            self._optimize(due)
        elif self._jobs:
            self._score()
        else:
            return did_work
        return True

    def fail(self, error: BaseException) -> None:
        """Fail all work, now and later, with StageStoppedError from `error`."""
        with self._lock:
            self._failure = error
            waiting: list[Future[Any]] = [future for _, future in self._inbox] + [job.future for job in self._jobs.values()]
            self._inbox.clear()
        self._jobs.clear()
        self._scored = None
        for future in waiting:
            _fail_future(future, self._stopped())

    def _stopped(self) -> StageStoppedError:
        stopped = StageStoppedError(f"the learner has stopped: {self._failure}")
        stopped.__cause__ = self._failure
        return stopped

    def _post(self, command: Callable[[], Any], future: "Future[Any] | None" = None) -> "Future[Any]":
        future = Future() if future is None else future
        future.set_running_or_notify_cancel()  # who stops waiting does not undo the work: from here on it cannot be cancelled
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._stopped())
                return future
            self._inbox.append((command, future))
        self._wake()
        return future

    def _drain_inbox(self) -> bool:
        """Run posted commands. A command that returns NotImplemented settles its future itself, later.

        A command that raises fails its own future and nobody else's, unless it took the device's state with it: then the stage fails too.
        """
        did_work = False
        while True:
            with self._lock:
                if not self._inbox:
                    return did_work
                command, future = self._inbox.popleft()
            did_work = True
            try:
                result = command()
            except Exception as error:  # whatever it is, it is this command's failure, recorded in its future
                _fail_future(future, error)
                if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):  # a device step failed after its inputs were donated
                    raise
            else:
                if result is not NotImplemented and not future.done():
                    future.set_result(result)

    def _load(self, spec: RunSpec, state: AdapterState) -> None:
        if spec.run_id in self._runs:
            raise StateConflictError(f"run {spec.run_id} is loaded already")
        if spec.lora.rank > self._settings.max_rank:
            raise StateConflictError(
                f"run {spec.run_id} has rank {spec.lora.rank}, this server's class is {self._settings.max_rank}: raise learner.max_rank"
            )
        for part, tree in zip(("adapter", "first moment", "second moment"), state[:3], strict=True):
            if problem := misfit(tree, self._config, self._settings.max_rank):
                raise StateConflictError(f"the {part} of run {spec.run_id} does not fit base {self._config.name}: {problem}")
        if not self._free_slots:
            raise SlotsExhaustedError(f"all {self._settings.num_slots} learner slots are taken: raise learner.num_slots or stop a run")
        run = _Run(spec, self._free_slots[0], hyperparameters(spec.optimizer))
        self._losses = self._losses_with(run, spec.loss)
        self._state = load_slot(self._state, run.slot, state)
        self._scale_A[run.slot] = spec.lora.scale
        self._runs[spec.run_id] = run
        self._free_slots.remove(run.slot)

    def _unload(self, run_id: str) -> None:
        run = self._runs.pop(run_id, None)
        if run is None:
            return
        job = self._jobs.pop(run_id, None)
        self._fair.forget(run_id)
        if job is not None:
            _fail_future(job.future, StageStoppedError(f"run {run_id} was stopped"))
        owners = set() if self._scored is None else {planned.run_id for planned in self._scored.plan.pieces}
        if owners == {run_id}:
            self._scored = None
        elif self._scored is not None and run_id in owners:
            self._pull(self._scored)  # the other runs' parts count; what it adds to this slot is cleared when the slot is loaded again
        self._free_slots.append(run.slot)

    def _submit(
        self, run_id: str, pieces: Sequence[Piece], future: "Future[StepResult]", *, loss: LossSpec | None, optimizer: OptimizerSpec | None
    ) -> Any:
        run = self._run(run_id)
        if run_id in self._jobs:
            raise StateConflictError(f"run {run_id} has an unfinished batch")
        if not any(len(piece.entries) for piece in pieces):
            raise InvalidRequestError(f"run {run_id} submitted a batch without a single trained token")
        largest = self._shapes[-1]
        for piece in pieces:
            if not largest.holds(piece.num_tiles, len(piece.entries)):
                raise TreeTooLargeError(
                    f"run {run_id}: a piece of {len(piece.ids_T)} positions and {len(piece.entries)} entries exceeds this learner's microbatch of "
                    f"{largest.num_positions} positions and {largest.num_entries} entries: cut the batch for it, or raise learner.max_positions"
                )
        job = _Job(run, pieces, loss or run.spec.loss, hyperparameters(optimizer) if optimizer else run.hyper, future)
        self._losses = self._losses_with(run, job.loss)
        self._jobs[run_id] = job
        self._fair.activate(run_id, run.spec.weight)
        return NotImplemented

    def _losses_with(self, run: _Run, loss: LossSpec) -> LossTable:
        """The losses of all batches under way, and this one in the run's slot. A run has one batch at a time. Raises InvalidRequestError."""
        losses = {job.run.slot: job.loss for job in self._jobs.values()} | {run.slot: loss}
        return loss_table(losses, self._settings.num_slots)

    def _run(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is None:
            raise StateConflictError(f"run {run_id} is not loaded")
        return run

    def _score_ids(self, run_id: str, ids: Ids) -> FloatArray:
        run = self._run(run_id)
        if not all(0 <= i < self._config.vocab_size for i in ids):
            raise InvalidRequestError(f"ids to score must be in [0, {self._config.vocab_size}), got {min(ids)} .. {max(ids)}")
        piece = _sequence(ids)
        plan = plan_microbatch([ReadyRun(_SCORED_RUN, run.slot, [piece])], self._shapes, 0)
        outputs, _ = score(self._params, self._state.params, jnp.asarray(self._scale_A), to_device(pack(plan)), self._config)
        return np.asarray(outputs.learner_logprobs_M)[: len(piece.entries)]

    def _score(self) -> None:
        plan = self._plan()
        start = self._clock.now()
        with self._spans.span("learner", "score", _owner(plan)):
            microbatch = pack(plan)
            arrays = to_device(microbatch)
            outputs, residuals = score(self._params, self._state.params, jnp.asarray(self._scale_A), arrays, self._config)
            cotangent_M, sums = loss_cotangents(outputs, loss_inputs(microbatch), self._losses)
            sums_A = jax.tree.map(np.asarray, sums)
        self._scored = _Scored(plan, arrays, residuals, cotangent_M)
        self._account(plan, self._clock.now() - start, sums_A)

    def _plan(self) -> MicrobatchPlan:
        waiting = [run_id for run_id, job in self._jobs.items() if job.next_piece < len(job.pieces)]
        jobs = [self._jobs[run_id] for run_id in self._fair.order(waiting)]
        limit = self._settings.max_positions
        if self._seconds_per_position > 0:
            limit = min(limit, int(self._max_stall_s / self._seconds_per_position))
        ready = [ReadyRun(job.run.spec.run_id, job.run.slot, job.pieces, job.next_piece) for job in jobs]
        return plan_microbatch(ready, self._shapes, limit)

    def _account(self, plan: MicrobatchPlan, seconds: float, sums_A: LossMetrics) -> None:
        self.num_microbatches += 1
        self.positions_useful += plan.num_positions
        self.positions_dispatched += plan.shape.num_positions
        for planned in plan.pieces:
            self._jobs[planned.run_id].next_piece = planned.piece_index + 1
            self._fair.charge(planned.run_id, planned.piece.num_tiles * TILE)
        for run_id in dict.fromkeys(planned.run_id for planned in plan.pieces):
            job = self._jobs[run_id]
            job.sums = sums_A if job.sums is None else LossMetrics(*(a + b for a, b in zip(job.sums, sums_A, strict=True)))
        self._charge_seconds(plan, seconds)

    def _charge_seconds(self, plan: MicrobatchPlan, seconds: float) -> None:
        total = sum(planned.piece.num_tiles for planned in plan.pieces)
        for planned in plan.pieces:
            if planned.run_id in self._jobs:
                self._jobs[planned.run_id].device_s += seconds * planned.piece.num_tiles / total

    def _pull(self, scored: _Scored) -> None:
        plan, start = scored.plan, self._clock.now()
        with self._spans.span("learner", "pull", _owner(plan)):
            gradient = pull(
                self._params,
                self._state.params,
                jnp.asarray(self._scale_A),
                scored.arrays,
                scored.residuals,
                cotangent_M=scored.cotangent_M,
                accumulators=self._state.gradient,
                config=self._config,
            )
            self._state = self._state._replace(gradient=jax.block_until_ready(gradient))
        self._scored = None
        seconds = self._clock.now() - start
        shape = plan.shape.num_positions
        if shape in self._seen_shapes:  # the first pass of a shape includes its compilation
            rate = seconds / shape
            self._seconds_per_position = rate if not self._seconds_per_position else 0.8 * self._seconds_per_position + 0.2 * rate
        self._seen_shapes.add(shape)
        for planned in plan.pieces:
            if planned.run_id in self._jobs:
                self._jobs[planned.run_id].num_pulled += 1
        self._charge_seconds(plan, seconds)

    def _optimize(self, job: _Job) -> None:
        run, run_id, start = job.run, job.run.spec.run_id, self._clock.now()
        with self._spans.span("learner", "optimize", run_id):
            self._state, norm, rate = apply_step(self._state, jnp.int32(run.slot), job.hyper)
            grad_norm, learning_rate = float(norm), float(rate)
            state = read_slot(self._state, run.slot)
        job.device_s += self._clock.now() - start
        outcome = _outcome(job, state, grad_norm, learning_rate)
        del self._jobs[run_id]  # last, so that until its future is settled `fail` knows of it
        self._fair.deactivate(run_id)
        if isinstance(outcome, GradientNotFiniteError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)


def _outcome(job: _Job, state: AdapterState, grad_norm: float, learning_rate: float) -> StepResult | GradientNotFiniteError:
    run_id = job.run.spec.run_id
    if not np.isfinite(grad_norm):
        return GradientNotFiniteError(
            f"run {run_id}: the gradient of the step after version {state.num_steps} has norm {grad_norm}; the adapter is unchanged. "
            "Look at the batch's rewards and log-probabilities, or lower the learning rate"
        )
    assert job.sums is not None, "a batch has pieces, and all are scored"
    num_entries = sum(len(piece.entries) for piece in job.pieces)
    metrics = run_metrics(job.sums, job.run.slot, job.loss.kind)
    return StepResult(run_id, state, grad_norm, learning_rate, metrics, job.num_positions, num_entries, job.device_s)


def _sequence(ids: Ids) -> Piece:
    """One plain sequence as a piece: an entry for every id but the first, temperature 1."""
    length = len(ids) - 1
    if length < 1:
        raise InvalidRequestError(f"scoring needs at least 2 ids, got {len(ids)}")
    zeros, floats = np.zeros(length, np.int32), np.zeros(length, np.float32)
    count = np.arange(length, dtype=np.int32)
    entries = Entries(count, np.array(ids[1:], np.int32), np.ones(length, np.float32), floats, floats, floats, zeros, zeros)
    return Piece(np.array(ids[:-1], np.int32), count, np.full(length, length, np.int32), entries)


def _owner(plan: MicrobatchPlan) -> str:
    """The run of a microbatch that holds one run only, "" for a shared one, whose seconds each run's StepResult has its part of."""
    run_ids = {planned.run_id for planned in plan.pieces}
    return run_ids.pop() if len(run_ids) == 1 else ""


def _fail_future(future: "Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
