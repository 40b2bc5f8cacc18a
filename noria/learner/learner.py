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

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from noria.config import LearnerConfig
from noria.errors import AdapterFileCorruptError, GradientNotFiniteError, InvalidRequestError, StageStoppedError, StateConflictError
from noria.learner.batches import BatchPlanner, Costs, PlannedBatch, sequence
from noria.learner.executors import Job, Owners, Scored, Walk, check, score_microbatch, warm_up_executors, whole_sizes, with_slots
from noria.learner.inbox import Inbox, fail_future
from noria.learner.memory import affordable_positions, walk_blocks
from noria.learner.operations import (
    BatchResult,
    EntryOutputs,
    Forward,
    ForwardBackward,
    Load,
    Operation,
    OptimResult,
    OptimStep,
    RunSpec,
    Save,
    StepResult,
)
from noria.learner.optimizer import apply_step, hyperparameters, read_gradient
from noria.learner.pace import Pace
from noria.learner.queue import FairOrder, plan_pass
from noria.learner.residency import Residency
from noria.learner.run_queue import LEADING_JOBS, RunQueue
from noria.learner.step import Model, counts_tiles, pull, score, to_device
from noria.model.config import ModelConfig
from noria.model.lora import AdapterState, HostAdapter
from noria.protocols import Clock, Spans
from noria.rl.losses import loss_table
from noria.rl.packing import MicrobatchPlan, ReadyRun, pack, plan_microbatch, shapes_up_to
from noria.types import FloatArray, Ids, LossSpec, OptimizerSpec, Piece, TokenTree

AnyBatch: TypeAlias = PlannedBatch | TokenTree | Sequence[Piece]
"""A batch: planned (`Learner.planner`), a tree, or pieces cut for this learner's largest microbatch."""


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
        self._params, self._config, self._settings = params, config, settings
        self._spans, self._clock = spans, clock
        base = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        self._shapes = shapes_up_to(affordable_positions(config, settings, base=base), is_counted=counts_tiles())
        self._num_rows = LEADING_JOBS * settings.num_slots
        self.planner = BatchPlanner(self._shapes[-1], settings.path_positions)
        self._costs = Costs(config)
        self._residency = Residency(config, settings, spill_dir=spill_dir)
        self._queues: dict[str, RunQueue] = {}
        self._busy: dict[str, RunQueue] = {}
        self._fair = FairOrder()
        self._pace = Pace(max_stall_s, settings.max_quantum_s)
        self._scored: Scored | None = None
        self._walk: Walk | None = None
        self._probes: deque[tuple[str, Ids, Future[FloatArray]]] = deque()
        self._inbox = Inbox(wake)
        self._num_groups = 0
        self.num_microbatches = 0
        self.positions_useful = 0
        self.positions_dispatched = 0

    def warm_up(self) -> None:
        """Compile every program of the closed set, before the first step and before any run is loaded. Seconds per shape for deep models."""
        assert not self._queues, "warm up first"
        self._residency.warm_up()
        for rank_class in self._settings.rank_classes:
            gradient = self._residency.slots(rank_class).gradient
            model, shapes = self._model(rank_class), self._shapes
            gradient = warm_up_executors(model, gradient, self._config, shapes, num_rows=self._num_rows, path_positions=self._settings.path_positions)
            state = self._residency.slots(rank_class)._replace(gradient=gradient)
            self._residency.replace(rank_class, apply_step(state, jnp.int32(0), hyperparameters(OptimizerSpec(0.0)))[0])
        self._pace.seen.update(shape.num_positions for shape in self._shapes)

    # ---- any thread -------------------------------------------------------------------------------------------------------------------

    def load_run(self, spec: RunSpec, state: AdapterState) -> "Future[None]":
        """Take a run in, with its state. It needs no free slot: idle runs make room.

        The future raises StateConflictError (loaded already, rank above all classes, a state that is not one of this model).
        """
        return self._inbox.post(lambda: self._load(spec, state))

    def unload_run(self, run_id: str) -> "Future[None]":
        """Forget the run; what it has under way is given up (the futures raise StageStoppedError)."""
        return self._inbox.post(lambda: self._unload(run_id))

    def forward(self, run_id: str, batch: AnyBatch, loss: LossSpec | None = None, *, of_base: bool = False) -> "Future[BatchResult]":
        """Score a batch. loss: None for the run's own; evaluated for its metrics. of_base: see `operations.Forward`.

        The future raises InvalidRequestError (no entries, an unknown loss, one that reads what the batch lacks), TreeTooLargeError,
        StateConflictError (unknown run), AdapterFileCorruptError (the run's state was on disk, and is damaged), StageStoppedError.
        """
        return self._submit(run_id, lambda: self._planned(batch), lambda spec, planned: [Forward(planned, loss or spec.loss, of_base)])[0]

    def forward_backward(
        self, run_id: str, batch: AnyBatch, loss: LossSpec | None = None, *, cotangents: EntryOutputs | None = None
    ) -> "Future[BatchResult]":
        """Score a batch and add its gradient to the run's pending one. cotangents: by entry, in place of a loss's. The future raises as `forward`."""

        def operations(spec: RunSpec, planned: PlannedBatch) -> list[Operation]:
            return [ForwardBackward(planned, loss or spec.loss, cotangents)]

        return self._submit(run_id, lambda: self._planned(batch), operations)[0]

    def optim_step(self, run_id: str, optimizer: OptimizerSpec | None = None) -> "Future[OptimResult]":
        """One optimizer step from all that was submitted before. optimizer: None for the run's own.

        The future raises GradientNotFiniteError (the adapter stays as it was, the pending gradient is cleared), and as `forward`.
        """
        return self._submit(run_id, lambda: None, lambda spec, _: [OptimStep(optimizer or spec.optimizer)])[0]

    def load(self, run_id: str, state: AdapterState) -> "Future[None]":
        """Replace the run's state, in its turn. The future raises StateConflictError (unknown run, a state that is not one of this model)."""
        return self._submit(run_id, lambda: None, lambda _spec, _: [Load(state)])[0]

    def save(self, run_id: str) -> "Future[AdapterState]":
        """The run's state after all that was submitted before. The future raises as `forward`."""
        return self._submit(run_id, lambda: None, lambda _spec, _: [Save()])[0]

    def train(self, run_id: str, batch: AnyBatch, *, loss: LossSpec | None = None, optimizer: OptimizerSpec | None = None) -> "Future[StepResult]":
        """forward_backward, optim_step and save in one. The future raises what each of them raises."""

        def operations(spec: RunSpec, planned: PlannedBatch) -> list[Operation]:
            return [ForwardBackward(planned, loss or spec.loss), OptimStep(optimizer or spec.optimizer), Save()]

        return _as_step(run_id, self._submit(run_id, lambda: self._planned(batch), operations, num_operations=3))

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
        return bool(self._inbox or self._busy or self._probes or self._scored)

    # ---- the device thread ------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One device dispatch: the pull of a scored microbatch, a probe, a barrier that is due, or whatever is next in fair order."""
        if self._scored is not None:
            self._pull(self._scored)
            return True
        did_work = self._inbox.drain(lambda: self._residency.is_intact)
        if self._probes:
            self._probe(*self._probes.popleft())
        elif due := next((queue for queue in self._busy.values() if queue.is_due), None):
            self._barrier(due)
        elif ready := [run_id for run_id, queue in self._busy.items() if not self._is_blocked(queue)]:
            self._fair.quantum = self._pace.quantum_flops
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
        self._scored = self._walk = None

    def _planned(self, batch: AnyBatch) -> PlannedBatch:
        return batch if isinstance(batch, PlannedBatch) else self.planner.plan(batch)

    def _submit(
        self,
        run_id: str,
        prepare: Callable[[], Any],
        operations: Callable[[RunSpec, Any], Sequence[Operation]],
        *,
        num_operations: int = 1,
    ) -> list["Future[Any]"]:
        """Queue operations that fail together. prepare: on this thread, off the device."""
        futures: list[Future[Any]] = [Future() for _ in range(num_operations)]
        try:
            prepared = prepare()
        except Exception as error:  # noqa: BLE001 - the caller's failure, handed back to it
            for future in futures:
                future.set_exception(error)
            return futures
        self._inbox.post(lambda: self._enqueue(run_id, operations, prepared, futures), *futures)
        return futures

    # ---- commands ---------------------------------------------------------------------------------------------------------------------

    def _load(self, spec: RunSpec, state: AdapterState) -> None:
        if spec.run_id in self._queues:
            raise StateConflictError(f"run {spec.run_id} is loaded already")
        hyperparameters(spec.optimizer)
        loss_table({0: spec.loss}, 1)
        self._residency.add(spec.run_id, spec.lora, state)
        self._queues[spec.run_id] = RunQueue(spec, state.num_steps)

    def _unload(self, run_id: str) -> None:
        queue = self._queues.pop(run_id, None)
        if queue is None:
            return
        self._fail_run(queue, StageStoppedError(f"run {run_id} was stopped"))
        self._fair.forget(run_id)
        self._residency.remove(run_id)

    def _fail_run(self, queue: RunQueue, error: BaseException) -> None:
        """Everything that the run has queued fails with `error`; nobody else's does."""
        run_id = queue.spec.run_id
        if self._walk is not None and self._walk.run_id == run_id:
            self._walk = None
        queue.fail(error)
        self._rest(queue)

    def _rest(self, queue: RunQueue) -> None:
        """Nothing more of the run, if its queue is empty."""
        if not len(queue) and self._busy.pop(queue.spec.run_id, None) is not None:
            self._fair.deactivate(queue.spec.run_id)

    def _enqueue(
        self, run_id: str, operations: Callable[[RunSpec, Any], Sequence[Operation]], prepared: Any, futures: Sequence["Future[Any]"]
    ) -> None:
        queue = self._queue(run_id)
        made = operations(queue.spec, prepared)
        for operation in made:
            if isinstance(operation, Forward | ForwardBackward):
                check(operation, run_id, has_values=self._settings.has_values)
            elif isinstance(operation, OptimStep):
                hyperparameters(operation.optimizer)
        self._num_groups += 1
        queue.append(made, futures, self._num_groups)
        self._busy[run_id] = queue
        self._fair.activate(run_id, queue.spec.weight)

    def _queue(self, run_id: str) -> RunQueue:
        queue = self._queues.get(run_id)
        if queue is None:
            raise StateConflictError(f"run {run_id} is not loaded")
        return queue

    def _read_gradient(self, run_id: str) -> HostAdapter:
        slot = self._residency.bring([run_id])[run_id]
        return read_gradient(self._residency.slots(self._residency.class_of(run_id)), slot)

    def _add_probe(self, run_id: str, ids: Ids, future: "Future[FloatArray]") -> None:
        self._queue(run_id)
        if len(ids) < 2:
            raise InvalidRequestError(f"scoring needs at least 2 ids, got {len(ids)}")
        if not all(0 <= i < self._config.vocab_size for i in ids):
            raise InvalidRequestError(f"ids to score must be in [0, {self._config.vocab_size}), got {min(ids)} .. {max(ids)}")
        self.planner.plan([sequence(ids)])
        self._probes.append((run_id, ids, future))

    # ---- dispatches -------------------------------------------------------------------------------------------------------------------

    def _model(self, rank_class: int) -> Model:
        return Model(self._params, self._residency.slots(rank_class).params, jnp.asarray(self._residency.scale_A(rank_class)))

    def _bring(self, run_ids: Sequence[str]) -> dict[str, int] | None:
        """Slots of these runs. None if one's state is lost: it has failed then, and the others are as they were."""
        try:
            return self._residency.bring(run_ids)
        except AdapterFileCorruptError:
            for run_id in run_ids:
                if error := self._residency.lost.get(run_id):
                    self._fail_run(self._queues[run_id], error)
            return None

    def _probe(self, run_id: str, ids: Ids, future: "Future[FloatArray]") -> None:
        try:
            slot, piece = self._residency.bring([run_id])[run_id], sequence(ids)
        except (StateConflictError, AdapterFileCorruptError) as error:
            fail_future(future, error)
            return
        plan = plan_microbatch([ReadyRun(run_id, slot, [piece])], self._shapes, 0)
        outputs, _ = score(self._model(self._residency.class_of(run_id)), to_device(pack(plan)), self._config)
        future.set_result(np.asarray(outputs.learner_logprobs_M)[: len(piece.entries)])

    def _is_blocked(self, queue: RunQueue) -> bool:
        """Whether the run waits for another's walk to end: one path of keys and values exists at a time."""
        job = queue.job
        return job is not None and job.batch.walk is not None and self._walk is not None and self._walk.job is not job

    def _next(self, order: Sequence[str]) -> None:
        """Serve the first run of `order`, and the others with what room it leaves."""
        queue = self._busy[order[0]]
        job = queue.job
        if job is None:
            self._barrier(queue)
            self._fair.end_turn(order[0])
        elif job.phase == "loss":
            with self._spans.span("learner", "loss", order[0]):
                job.evaluate(whole_sizes(self._shapes), self._num_rows)
            self._settle([queue])
        elif job.batch.walk is not None:
            self._visit(queue, job)
        else:
            self._score(order)

    def _settle(self, queues: Sequence[RunQueue]) -> None:
        for queue in queues:
            if queue.settle():
                self._fair.end_turn(queue.spec.run_id)
                self._rest(queue)

    def _barrier(self, queue: RunQueue) -> None:
        operation, run_id = queue.barrier, queue.spec.run_id
        self._fair.charge(run_id, self._costs.tile)
        try:
            match operation:
                case OptimStep(optimizer):
                    self._optimize(queue, optimizer)
                case Load(state):
                    self._residency.load(run_id, state)
                    queue.num_steps = state.num_steps
                    queue.finish_head(None)
                case Save():
                    queue.finish_head(self._residency.read(run_id))
        except Exception as error:  # whatever it is, it is this operation's failure, recorded in its future
            if not self._residency.is_intact:
                raise
            queue.fail_head(error)
        self._rest(queue)

    def _optimize(self, queue: RunQueue, optimizer: OptimizerSpec) -> None:
        run_id, start = queue.spec.run_id, self._clock.now()
        slot, rank_class = self._residency.bring([run_id])[run_id], self._residency.class_of(run_id)
        with self._spans.span("learner", "optimize", run_id):
            state, norm, rate = apply_step(self._residency.slots(rank_class), jnp.int32(slot), hyperparameters(optimizer))
            self._residency.replace(rank_class, state)
            grad_norm, learning_rate = float(norm), float(rate)
        if np.isfinite(grad_norm):
            queue.num_steps += 1
            queue.finish_head(OptimResult(grad_norm, learning_rate, queue.num_steps, self._clock.now() - start))
        else:
            queue.fail_head(
                GradientNotFiniteError(
                    f"run {run_id}: the gradient of the step after version {queue.num_steps} has norm {grad_norm}; the adapter is unchanged. "
                    "Look at the batch's rewards and log-probabilities, or lower the learning rate"
                )
            )

    def _score(self, order: Sequence[str]) -> None:
        """The forward pass of the next microbatch."""
        most = self._shapes[-1].num_tiles
        found = {run_id: self._busy[run_id].offer(self._residency.class_of(run_id), most=most) for run_id in order}
        offers = {run_id: offer for run_id, offer in found.items() if offer is not None}
        max_positions = self._pace.max_positions(self._shapes[-1].num_positions)
        plan = plan_pass([offer for offer, _ in offers.values()], self._shapes, max_positions, num_slots=self._settings.num_slots)
        run_ids = list(dict.fromkeys(planned.run_id for planned in plan.pieces))
        slot_of = self._bring(run_ids)
        if slot_of is None:
            return
        mode, start = offers[order[0]][0].mode, self._clock.now()
        owners = [offers[planned.run_id][1][planned.piece_index] for planned in plan.pieces]
        plan, model = with_slots(plan, slot_of), self._model(self._residency.class_of(order[0]))
        with self._spans.span("learner", "score" if mode == "train" else mode, _owner(plan)):
            self._scored = score_microbatch(plan, owners, mode, model, self._config, num_rows=self._num_rows)
        self.num_microbatches += 1
        self.positions_useful += plan.num_positions
        self.positions_dispatched += plan.dispatched_positions
        self._account(plan, owners, self._costs.score, self._clock.now() - start)
        if self._scored is None:
            self._visited(plan, owners)

    def _pull(self, scored: Scored) -> None:
        """The backward pass of what was scored in the step before."""
        plan, start = scored.plan, self._clock.now()
        rank_class = self._residency.class_of(plan.pieces[0].run_id)
        with self._spans.span("learner", "pull", _owner(plan)):
            state = self._residency.slots(rank_class)
            gradient = pull(self._model(rank_class), scored.arrays, scored.residuals, scored.cotangents, state.gradient, config=self._config)
            self._residency.replace(rank_class, state._replace(gradient=jax.block_until_ready(gradient)))
        self._scored = None
        seconds = self._clock.now() - start
        flops = sum(self._costs.pull(planned.piece) for planned in plan.pieces)
        self._pace.pulled(plan.shape.num_positions, plan.dispatched_positions, seconds, flops)
        self._account(plan, scored.owners, self._costs.pull, seconds)
        self._visited(plan, scored.owners)

    def _visited(self, plan: MicrobatchPlan, owners: Owners) -> None:
        for job, _ in owners:
            job.visited()
        self._settle([self._queues[run_id] for run_id in dict.fromkeys(planned.run_id for planned in plan.pieces)])

    def _account(self, plan: MicrobatchPlan, owners: Owners, cost: Callable[[Piece], float], seconds: float) -> None:
        """Charge runs for their pieces, and jobs for their part of the seconds, by tiles."""
        total = sum(planned.piece.num_tiles for planned in plan.pieces)
        for planned, (job, _) in zip(plan.pieces, owners, strict=True):
            self._fair.charge(planned.run_id, cost(planned.piece))
            job.device_s += seconds * planned.piece.num_tiles / total

    def _visit(self, queue: RunQueue, job: Job) -> None:
        """One visit of a walk."""
        run_id, start = queue.spec.run_id, self._clock.now()
        slot_of = self._bring([run_id])
        if slot_of is None:
            return
        if self._walk is None:
            shape = self._shapes[-1]
            blocks, is_on_host = walk_blocks(self._settings.path_positions, shape), self._settings.is_path_on_host
            self._walk = Walk(run_id, job, shape, self._config, self._costs, num_rows=self._num_rows, num_blocks=blocks, is_on_host=is_on_host)
        rank_class = self._residency.class_of(run_id)
        state = self._residency.slots(rank_class)
        with self._spans.span("learner", "replay", run_id):
            gradient = self._walk.advance(self._model(rank_class), slot_of[run_id], state.gradient)
            self._residency.replace(rank_class, state._replace(gradient=jax.block_until_ready(gradient)))
        seconds = self._clock.now() - start
        job.device_s += seconds
        self._fair.charge(run_id, self._walk.visit_flops)
        self._pace.visited(seconds, self._walk.visit_flops)
        if job.mode is None:  # a loss, or the end: no path is needed any more
            self._walk = None
        self._settle([queue])


def _as_step(run_id: str, parts: Sequence["Future[Any]"]) -> "Future[StepResult]":
    """A future of the three as one result, or of what the first failure was."""
    whole: Future[StepResult] = Future()
    whole.set_running_or_notify_cancel()

    def fail(part: "Future[Any]") -> None:
        if (error := part.exception()) is not None:
            fail_future(whole, error)

    def finish(saved: "Future[Any]") -> None:
        if saved.exception() is None:
            batch, optim = parts[0].result(), parts[1].result()
            device_s = batch.device_s + optim.device_s
            rates = optim.grad_norm, optim.learning_rate
            whole.set_result(StepResult(run_id, saved.result(), *rates, batch.metrics, batch.num_positions, batch.num_entries, device_s))

    for part in parts:
        part.add_done_callback(fail)
    parts[-1].add_done_callback(finish)
    return whole


def _owner(plan: MicrobatchPlan) -> str:
    """The run of a microbatch that holds one run only, "" for a shared one, whose seconds each run's results have their part of."""
    run_ids = {planned.run_id for planned in plan.pieces}
    return run_ids.pop() if len(run_ids) == 1 else ""
