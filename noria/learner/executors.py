"""How batches go over the device: a job is one forward or forward_backward on its way, in phases, each of which visits all parts of its batch once.

    reference    outputs of the base, for losses that read them (adapter off)
    train        score, loss, pull, part by part: where every part holds the loss's scope whole
    score        outputs alone; then
    loss         once over the whole batch; then
    pull         score and pull, with cotangents that are known by entry

A loss that sees no further than a part is one `train`; any other, a split batch of pairs say, is `score`, `loss`, `pull`; cotangents that a caller
brings are a `pull`. The phases are the same for packed pieces and for the chunks of a walk.

A microbatch has its own table of losses, a row for each job in it: runs and operations with different losses share it, and a job's metrics are its
row's sums. Deliberately not here: which jobs share a microbatch, and when (`learner/learner.py`, `learner/queue.py`).

    M entry   A adapter slot   row: of the table of losses
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from noria.learner.batches import COLUMNS, Column, Costs, PlannedBatch, of_walk
from noria.learner.memory import walk_blocks
from noria.learner.operations import BatchResult, EntryOutputs, Forward, ForwardBackward, Pass
from noria.learner.queue import Mode
from noria.learner.replay import Replay
from noria.learner.step import Arrays, Model, Residuals, loss_cotangents, pull, reference, score, to_device, without_adapters
from noria.model.config import ModelConfig
from noria.model.lora import AdapterTree
from noria.rl.chunks import Action, Chunk, plan_replay
from noria.rl.losses import (
    LossInputs,
    LossMetrics,
    LossTable,
    TokenCotangents,
    TokenOutputs,
    fields_read,
    loss_inputs_of,
    loss_table,
    run_metrics,
    scope_of,
)
from noria.rl.packing import MicrobatchPlan, MicrobatchShape, PlannedPiece, pack
from noria.types import TILE, Entries, FloatArray, IntArray, LossSpec, Microbatch, Piece, TokenTree

Phase: TypeAlias = Literal["reference", "score", "train", "loss", "pull"]

_MODE_OF: dict[Phase, Mode] = {"reference": "reference", "score": "score", "train": "train", "pull": "train"}

_MAX_SUMMED = 2**21
"""Entries that the exact sums of `rl/sums.py` hold."""


def is_whole(batch: PlannedBatch, loss: LossSpec) -> bool:
    """Whether every part of the batch holds whatever the loss must see at once."""
    match scope_of(loss):
        case "token":
            return True
        case "sequence":
            return batch.holds_whole(batch.entries.sequence_M)
        case "pair":
            return batch.holds_whole(np.asarray(batch.columns["pair_M"], np.int32))
        case "batch":
            return len(batch.parts) == 1


@final
class Job:
    """One forward or forward_backward on its way. Owned by the device thread.

    phase: the present one, None when all is done. next_part: the first part that this phase has not visited.
    """

    def __init__(self, operation: Pass, *, num_steps: int) -> None:
        """num_steps: optimizer steps of the run's adapter, which is its version."""
        self.operation, self.batch, self.loss = operation, operation.batch, operation.loss
        self._waiting: deque[Phase] = deque(_phases(operation))
        self.phase: Phase | None = self._waiting.popleft()
        self._is_whole = "loss" not in self._waiting
        self.next_part = 0
        self.device_s = 0.0
        self.columns: dict[str, Column] = dict(self.batch.columns)
        if "staleness_M" in fields_read(self.loss) and "staleness_M" not in self.columns:
            self.columns["staleness_M"] = np.maximum(num_steps - self.batch.entries.version_M, 0).astype(np.int32)
        if self.phase == "reference":
            self.columns["reference_logprobs_M"] = np.zeros(len(self.batch.entries), np.float32)
        self._outputs, self._cotangents = (np.zeros((3, len(self.batch.entries)), np.float32) for _ in range(2))
        given = None if isinstance(operation, Forward) else operation.cotangents
        if given is not None:
            self._cotangents = np.stack([np.asarray(getattr(given, f.name), np.float32) for f in fields(EntryOutputs)])
        self._sums: FloatArray | None = None

    @property
    def mode(self) -> Mode | None:
        """What kind of pass the present phase needs; None for `loss`, and at the end."""
        return None if self.phase is None else _MODE_OF.get(self.phase)

    @property
    def wants_loss(self) -> bool:
        """Whether the present phase evaluates the loss part by part."""
        return self.phase == "train" or (self.phase == "score" and self._is_whole)

    def visited(self, num_parts: int = 1) -> None:
        """So many more parts have been visited in this phase."""
        self.next_part += num_parts
        if self.next_part >= len(self.batch.parts):
            self.end_phase()

    def end_phase(self) -> None:
        """The present phase is done."""
        self.phase, self.next_part = (self._waiting.popleft() if self._waiting else None), 0

    def see(self, part: int, outputs: Sequence[FloatArray]) -> None:
        """A part's outputs, its entries alone."""
        self._outputs[:, self.batch.places[part]] = outputs

    def see_reference(self, part: int, logprobs_M: FloatArray) -> None:
        """A part's log-probabilities with the adapter off."""
        self.columns["reference_logprobs_M"][self.batch.places[part]] = logprobs_M

    def see_loss(self, part: int, cotangents: Sequence[FloatArray]) -> None:
        """What the loss made of a part."""
        if self.phase == "train":
            self._cotangents[:, self.batch.places[part]] = cotangents

    def add_metrics(self, sums: FloatArray) -> None:
        """Sums of the loss's metrics, in the order of LossMetrics."""
        self._sums = sums if self._sums is None else self._sums + sums

    def known_cotangents(self, part: int) -> FloatArray:
        """A part's cotangents [3, entries], if they are known before it is scored: zeros where it is only scored."""
        known: FloatArray = self._cotangents[:, self.batch.places[part]]
        return known if self.phase == "pull" else np.zeros_like(known)

    def evaluate(self, sizes: Sequence[int], num_rows: int) -> None:
        """The phase `loss`: once over the whole batch, in its own order. sizes, num_rows: see `whole_sizes` and `num_loss_rows`."""
        count = len(self.batch.entries)
        size = next(size for size in sizes if size >= count)  # batches beyond the last were refused
        missing = size - count

        def padded(column: Any, fill: int = 0) -> Any:
            return np.pad(column, (0, missing), constant_values=fill)

        columns: dict[str, Any] = {f.name: padded(getattr(self.batch.entries, f.name)) for f in fields(Entries)}
        entries = Entries(**(columns | {"sequence_M": padded(_numbered(self.batch.entries.sequence_M), size - 1)}))
        others: dict[str, Any] = {name: padded(_numbered(column) if name == "pair_M" else column) for name, column in self.columns.items()}
        inputs = loss_inputs_of(entries, np.zeros(size, np.int32), **others)
        outputs = jax.device_put(TokenOutputs(*map(padded, self._outputs)), jax.devices()[0])  # named, as a pass's outputs are: one program for both
        cotangents, sums = loss_cotangents(outputs, jax.tree.map(jnp.asarray, inputs), loss_table({0: self.loss}, num_rows))
        if not isinstance(self.operation, Forward):
            self._cotangents = np.stack([np.asarray(d_M)[:count] for d_M in cotangents])
        self.add_metrics(np.stack([np.asarray(leaf) for leaf in sums])[:, 0])
        self.end_phase()

    def result(self) -> BatchResult:
        """What came of it; all phases are done."""
        assert self.phase is None
        batch = self.batch
        metrics = {} if self._sums is None else run_metrics(LossMetrics(*self._sums[:, None]), 0, self.loss.kind)
        if batch.walk is not None:
            metrics |= {"replay_chunks": float(len(batch.parts)), "prefix_gradient_stop": float(batch.prefix_gradient == "stop")}
        if isinstance(self.operation, Forward) and self.operation.of_base:
            self._outputs[0] = self.columns["reference_logprobs_M"]
        outputs, cotangents = EntryOutputs(*self._outputs), EntryOutputs(*self._cotangents)
        return BatchResult(outputs, cotangents, metrics, batch.num_positions, len(batch.entries), self.device_s)


def _phases(operation: Pass) -> list[Phase]:
    if not isinstance(operation, Forward) and operation.cotangents is not None:
        return ["pull"]
    if isinstance(operation, Forward) and operation.of_base:
        return ["reference"]
    batch, loss = operation.batch, operation.loss
    needs_reference = "reference_logprobs_M" in fields_read(loss) and "reference_logprobs_M" not in batch.columns
    before: list[Phase] = ["reference"] if needs_reference else []
    if isinstance(operation, Forward):
        return [*before, "score"] if is_whole(batch, loss) else [*before, "score", "loss"]
    return [*before, "train"] if is_whole(batch, loss) else [*before, "score", "loss", "pull"]


def whole_sizes(shapes: Sequence[MicrobatchShape]) -> tuple[int, ...]:
    """Sizes of the axis M of a loss over a whole batch: those of microbatches, whose programs exist, and two larger ones. All there are: a loss that
    must see more at once is refused.

    A loss costs next to nothing beside the model (0.35 microseconds an entry on a CPU), so what matters is how far the few sizes reach.
    """
    sizes = sorted({shape.num_entries for shape in shapes})
    return (*sizes, *(size for size in (8 * sizes[-1], 64 * sizes[-1]) if size <= _MAX_SUMMED))


Owners: TypeAlias = Sequence[tuple[Job, int]]
"""The job and the part of each planned piece."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A microbatch between score and pull. plan: with its slots."""

    plan: MicrobatchPlan
    owners: Owners
    arrays: Arrays
    residuals: Residuals
    cotangents: TokenCotangents


def score_microbatch(plan: MicrobatchPlan, owners: Owners, mode: Mode, model: Model, config: ModelConfig, *, num_rows: int) -> Scored | None:
    """The forward pass of a microbatch, and the loss where its jobs want it. What it is to be pulled with if its mode is "train", else None."""
    microbatch = pack(plan)
    arrays = to_device(microbatch)
    where = [slice(placed.first_entry, placed.first_entry + placed.num_entries) for placed in microbatch.placed]
    if mode == "reference":
        logprobs_M = np.asarray(reference(model, arrays, config))
        for (job, part), at in zip(owners, where, strict=True):
            job.see_reference(part, logprobs_M[at])
        return None
    outputs, residuals = score(model, arrays, config)
    for (job, part), at in zip(owners, where, strict=True):
        job.see(part, [np.asarray(output_M)[at] for output_M in outputs])
    cotangents = judge(microbatch, owners, outputs, is_training=mode == "train", num_rows=num_rows)
    return None if cotangents is None else Scored(plan, owners, arrays, residuals, cotangents)


def judge(microbatch: Microbatch, owners: Owners, outputs: TokenOutputs, *, is_training: bool, num_rows: int) -> TokenCotangents | None:
    """The cotangents of a scored microbatch, None unless it trains: those of its jobs' losses, and those that are known."""
    where = [slice(placed.first_entry, placed.first_entry + placed.num_entries) for placed in microbatch.placed]
    cotangents: Sequence[Any] = [np.zeros(len(microbatch.entries), np.float32)] * 3
    if any(job.wants_loss for job, _ in owners):
        inputs, table, row_of = _loss_of(microbatch, owners, where, num_rows)
        found, sums = loss_cotangents(outputs, jax.tree.map(jnp.asarray, inputs), table)
        cotangents, columns = found, np.stack([np.asarray(leaf) for leaf in sums])
        host = [np.asarray(d_M) for d_M in found]
        for (job, part), at in zip(owners, where, strict=True):
            job.see_loss(part, [d_M[at] for d_M in host])
        for job, row in row_of.items():
            if job.wants_loss:
                job.add_metrics(columns[:, row])
    if not is_training:
        return None
    if any(job.phase != "train" for job, _ in owners):
        cotangents = [np.array(d_M) for d_M in cotangents]
        for (job, part), at in zip(owners, where, strict=True):
            if job.phase != "train":
                for d_M, known_M in zip(cotangents, job.known_cotangents(part), strict=True):
                    d_M[at] = known_M
    return jax.device_put(TokenCotangents(*cotangents), jax.devices()[0])  # named, as a loss's are: one program, whoever brings them


def _loss_of(microbatch: Microbatch, owners: Owners, where: Sequence[slice], num_rows: int) -> tuple[LossInputs, LossTable, dict[Job, int]]:
    """The loss's inputs of a microbatch, its table, and the row of each job."""
    row_of = {job: row for row, job in enumerate(dict.fromkeys(job for job, _ in owners))}
    row_M = np.zeros(len(microbatch.entries), np.int32)
    others: dict[str, Any] = {}
    for (job, part), at in zip(owners, where, strict=True):
        row_M[at] = row_of[job]
        for name, column in job.columns.items():
            values = column[job.batch.places[part]]
            if name == "pair_M":  # unique among all pairs of the microbatch, of which an entry opens at most one
                values = _numbered(values) + np.int32(at.start)
            others.setdefault(name, np.zeros(len(row_M), COLUMNS[name]))[at] = values
    return loss_inputs_of(microbatch.entries, row_M, **others), loss_table({row: job.loss for job, row in row_of.items()}, num_rows), row_of


def _numbered(group_M: Any) -> IntArray:
    """Groups numbered from 0 on, whatever they were called."""
    return np.unique(group_M, return_inverse=True)[1].astype(np.int32)


def with_slots(plan: MicrobatchPlan, slot_of: dict[str, int]) -> MicrobatchPlan:
    """The plan with every piece in its run's slot."""
    return replace(plan, pieces=tuple(replace(planned, slot=slot_of[planned.run_id]) for planned in plan.pieces))


@final
class Walk:
    """A job whose tree fits in no microbatch, on the replay executor: one walk per phase, one visit at a time. Owned by the device thread.

    It holds the path's keys and values, and their gradient.
    """

    def __init__(
        self,
        run_id: str,
        job: Job,
        shape: MicrobatchShape,
        config: ModelConfig,
        costs: Costs,
        *,
        num_rows: int,
        num_blocks: int | None = None,
        is_on_host: bool = False,
    ) -> None:
        """shape: of the chunks. num_rows: of the table of losses. num_blocks, is_on_host: of the path (`Replay`)."""
        assert job.batch.walk is not None
        self._num_blocks, self._is_on_host = num_blocks, is_on_host
        self.run_id, self.job, self._plan = run_id, job, job.batch.walk
        self._shape, self._config, self._costs, self._num_rows = shape, config, costs, num_rows
        self._replay: Replay | None = None
        self._num_left = 0
        self.visit_flops = self.visit_s = 0.0

    def advance(self, model: Model, slot: int, accumulators: AdapterTree) -> AdapterTree:
        """One visit of the present phase, or the first half of one (`is_halfway`). slot: where the run lies now. accumulators: gradients of all slots
        (donated); returned with what is new."""
        phase = self.job.phase
        if self._replay is None:
            is_forward = phase in ("score", "reference")
            self._replay = Replay(
                self._plan,
                self._shape,
                self._config,
                judge=self._judge,
                is_forward=is_forward,
                num_blocks=self._num_blocks,
                is_on_host=self._is_on_host,
            )
            self._num_left = len(self._plan.chunks) if is_forward else len(self._plan.visits)
            self.visit_flops = self._total_flops(is_forward=is_forward) / self._num_left
        added = self._replay.advance(without_adapters(model) if phase == "reference" else model, slot, accumulators)
        assert added is not None, "a walk has as many visits as its plan says"
        self._num_left -= not self._replay.is_halfway
        if not self._num_left:
            self._replay = None
            self.job.end_phase()
        return added

    @property
    def is_halfway(self) -> bool:
        """A chunk is scored, and its pull is what `advance` does next; until then the run may not change its slot."""
        return self._replay is not None and self._replay.is_halfway

    def park(self) -> None:
        """Let the path wait in host memory until the next visit: another walk has the device."""
        if self._replay is not None:
            self._replay.park()

    def _judge(self, index: int, microbatch: Microbatch, outputs: TokenOutputs) -> TokenCotangents:
        count = len(self._plan.chunks[index].entry_M)
        if self.job.phase == "reference":
            self.job.see_reference(index, np.asarray(outputs.learner_logprobs_M)[:count])
        else:
            self.job.see(index, [np.asarray(output_M)[:count] for output_M in outputs])
        is_training = self.job.mode == "train"
        found = judge(microbatch, [(self.job, index)], outputs, is_training=is_training, num_rows=self._num_rows)
        return TokenCotangents(*outputs) if found is None else found

    def _total_flops(self, *, is_forward: bool) -> float:
        def cost(action: Action, chunk: Chunk) -> float:
            path = chunk.first_block * TILE
            scored = self._costs.score(chunk.piece, path)
            return scored if is_forward or action == "enter" else scored + self._costs.pull(chunk.piece, path)

        if is_forward:
            return sum(cost("enter", chunk) for chunk in self._plan.chunks)
        return sum(cost(visit.action, self._plan.chunks[visit.chunk]) for visit in self._plan.visits if visit.action != "drop")


def warm_up_executors(
    model: Model, gradient: AdapterTree, config: ModelConfig, shapes: Sequence[MicrobatchShape], *, num_rows: int, path_positions: int
) -> AdapterTree:
    """Compile what one rank class needs, by one batch of nothing at each size. gradient: of all slots (donated); returned, zeros as it was."""
    for shape in shapes:
        job = Job(ForwardBackward(_nothing(1), LossSpec()), num_steps=0)
        plan = MicrobatchPlan(shape, (PlannedPiece("", 0, 0, job.batch.parts[0]),))
        scored = score_microbatch(plan, [(job, 0)], "train", model, config, num_rows=num_rows)
        assert scored is not None
        reference(model, scored.arrays, config)
        gradient = jax.block_until_ready(pull(model, scored.arrays, scored.residuals, scored.cotangents, gradient, config=config))
    if path_positions:
        gradient = _warm_up_walks(model, gradient, config, shapes[-1], num_rows=num_rows, path_positions=path_positions)
    for size in whole_sizes(shapes):
        job = Job(Forward(_nothing(size), LossSpec(m2_cap=1.0)), num_steps=0)
        job.evaluate((size,), num_rows)
    return gradient


def _warm_up_walks(
    model: Model, gradient: AdapterTree, config: ModelConfig, shape: MicrobatchShape, *, num_rows: int, path_positions: int
) -> AdapterTree:
    """A sequence of two chunks, whose last token trains nothing: every program of a walk runs once."""
    length = np.array([shape.num_positions + TILE], np.int32)
    count, nothing = np.arange(length[0], dtype=np.int32), _nothing(1).entries
    entries = replace(nothing, predict_from_M=length - 1)
    zero = np.zeros(1, np.int32)
    tree = TokenTree(np.zeros_like(count), count, np.full_like(count, length[0]), zero, length, zero - 1, entries, zero, 1)
    job = Job(ForwardBackward(of_walk(tree, plan_replay(tree, shape.num_positions)), LossSpec()), num_steps=0)
    blocks = walk_blocks(path_positions, shape)
    walk = Walk("", job, shape, config, Costs(config), num_rows=num_rows, num_blocks=blocks)
    while job.phase is not None:
        gradient = walk.advance(model, 0, gradient)
    return jax.block_until_ready(gradient)


def _nothing(num_entries: int) -> PlannedBatch:
    """A batch of so many entries that train nothing."""
    zeros, floats = np.zeros(num_entries, np.int32), np.zeros(num_entries, np.float32)
    entries = Entries(zeros, zeros, np.ones(num_entries, np.float32), floats, floats, floats, zeros, zeros)
    piece = Piece(np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, np.int32), entries)
    return PlannedBatch((piece,), (np.arange(num_entries),), entries, {})
