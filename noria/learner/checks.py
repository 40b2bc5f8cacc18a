"""What a caller may ask of the learner: everything handed in is looked at here, at the edge, and refused by name, with the value seen.

A batch goes over the device beside other runs' batches, where an index out of range reads a neighbour's memory or fails the pass of all of them. So
nothing reaches the device thread that has not been through here; what is asked of arrays is vectorised, and done on the submitting thread.

A NaN in what the sampler or the environment measured (log-probabilities, advantages, weights, columns) is let through: the run's gradient is then a
NaN too, and its optimizer step is refused. Deliberately not here: whether a state fits the model (`learner/residency.py`).

    M entry   T position   P part
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, get_args

import numpy as np

from noria.errors import InvalidRequestError, StateConflictError, TreeTooLargeError
from noria.learner.arrays import entry_dtype, exact, is_exact
from noria.learner.batches import COLUMNS, BatchPlanner, PlannedBatch, longest_path, walk_fits
from noria.learner.executors import is_whole, whole_sizes
from noria.learner.operations import EntryOutputs, Forward, ForwardBackward, Load, Operation, OptimStep, Pass, RunSpec
from noria.learner.optimizer import hyperparameters
from noria.model.lora import AdapterState
from noria.rl.chunks import Chunk, PrefixGradient, ReplayPlan, Visit
from noria.rl.losses import fields_read, loss_table
from noria.rl.packing import MicrobatchShape
from noria.types import ENTRY_TILE, Entries, Ids, LoraSpec, LossSpec, OptimizerSpec, Piece, TokenTree

_NEEDED: Final = ("returns_M", "behavior_values_M", "pair_M")
"""Columns that nobody but the batch's maker can fill."""
_MAX_FLOAT: Final = float(np.finfo(np.float32).max)
_MAX_INT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a learner has room for. shape: its largest microbatch. path_positions: the longest path it walks, 0 for none. has_values: value heads."""

    shape: MicrobatchShape
    path_positions: int
    vocab_size: int
    has_values: bool


# ---- any thread ---------------------------------------------------------------------------------------------------------------------------


def batch_of(given: object, planner: BatchPlanner, sizes: Sizes) -> PlannedBatch:
    """The batch as the learner executes it. given: a PlannedBatch, a TokenTree, or Pieces.

    Raises InvalidRequestError: what is none, no entries, numbers out of range. TreeTooLargeError: parts, or a path, beyond these sizes.
    """
    if isinstance(given, PlannedBatch):
        batch = given
    elif isinstance(given, TokenTree | Sequence):
        batch = planner.plan(given)
    else:
        raise InvalidRequestError(f"a batch must be a TokenTree, Pieces or a PlannedBatch, got {type(given).__name__}")
    if not (isinstance(batch.entries, Entries) and isinstance(batch.parts, tuple) and all(isinstance(part, Piece) for part in batch.parts)):
        raise InvalidRequestError(f"a planned batch has Pieces and Entries, got {type(batch.parts).__name__} and {type(batch.entries).__name__}")
    _check_dtypes(batch)
    if not batch.parts or not len(batch.entries):
        raise InvalidRequestError("a batch without a single trained token")
    _check_places(batch)
    _check_fit(batch, sizes)
    _check_positions(batch.parts, sizes)
    _check_entries(batch.entries, sizes)
    return batch


def cotangents_of(given: object, batch: PlannedBatch, sizes: Sizes) -> EntryOutputs:
    """Cotangents, float32 [M] each. Raises InvalidRequestError: they are none, or not finite, or of values where there is no room for value heads."""
    if not isinstance(given, EntryOutputs):
        raise InvalidRequestError(f"cotangents must be EntryOutputs, got {type(given).__name__}")
    count = len(batch.entries)
    made = EntryOutputs(*(exact(f"cotangents.{f.name}, one per entry,", getattr(given, f.name), np.float32, count) for f in fields(EntryOutputs)))
    for f in fields(EntryOutputs):
        is_finite_M = np.isfinite(getattr(made, f.name))
        if not is_finite_M.all():
            where = int(np.argmin(is_finite_M))
            raise InvalidRequestError(f"cotangents.{f.name} of entry {where} is {getattr(made, f.name)[where]}: cotangents must be finite")
    if made.value_M.any() and not sizes.has_values:
        raise InvalidRequestError("cotangents.value_M is not zero, this learner has no room for value heads: set learner.has_values")
    return made


def ids_of(given: object, sizes: Sizes) -> Ids:
    """Ids to score. Raises InvalidRequestError: they are no integers, fewer than 2, or outside the vocabulary."""
    ids_T = exact("ids to score", given, np.int32)
    if len(ids_T) < 2:
        raise InvalidRequestError(f"scoring needs at least 2 ids, got {len(ids_T)}")
    _check_range("ids to score", ids_T, 0, sizes.vocab_size)
    return tuple(ids_T.tolist())


# ---- specs and states ---------------------------------------------------------------------------------------------------------------------


def check(operation: Operation, run_id: str, sizes: Sizes) -> None:
    """Whether the learner can take an operation in. Raises InvalidRequestError, TreeTooLargeError: it cannot, and why."""
    match operation:
        case Forward() | ForwardBackward():
            _check_pass(operation, run_id, sizes)
        case OptimStep(optimizer):
            check_optimizer(optimizer)
        case Load(state):
            check_state(state)


def _check_pass(operation: Pass, run_id: str, sizes: Sizes) -> None:
    """Whether the loss of an operation can be evaluated on its batch, which has passed `batch_of`.

    Raises InvalidRequestError: an unknown loss, a setting out of range, a loss that reads what neither batch nor learner has. TreeTooLargeError: one
    that must see a whole batch at once which is too large for that.
    """
    batch, loss = operation.batch, operation.loss
    if not isinstance(batch, PlannedBatch):
        raise InvalidRequestError(f"a batch must be a TokenTree, Pieces or a PlannedBatch, got {type(batch).__name__}")
    check_loss(loss)
    if isinstance(operation, Forward):
        if not isinstance(operation.of_base, bool):
            raise InvalidRequestError(f"of_base must be a truth, got {operation.of_base!r}")
        if operation.of_base:
            return
    elif operation.cotangents is not None:
        return
    read = fields_read(loss)
    if missing := [name for name in _NEEDED if name in read and name not in batch.columns]:
        raise InvalidRequestError(f"loss {loss.kind} reads {', '.join(missing)}, which this batch of run {run_id} has no columns of")
    if "value_M" in read and not sizes.has_values:
        raise InvalidRequestError(f"loss {loss.kind} trains a critic, this learner has no room for value heads: set learner.has_values")
    most = whole_sizes([sizes.shape])[-1]
    if len(batch.entries) > most and not is_whole(batch, loss):
        raise TreeTooLargeError(
            f"loss {loss.kind} of run {run_id} must see {len(batch.entries)} entries at once, this learner at most {most}: "
            "raise learner.max_positions, or make the run's batches smaller"
        )


def check_loss(loss: LossSpec) -> None:
    """Raises InvalidRequestError: an unknown kind or estimator, a setting that is no number, or out of its range."""
    if not isinstance(loss, LossSpec):
        raise InvalidRequestError(f"a loss must be a LossSpec, got {type(loss).__name__}")
    for f in fields(loss):
        value = getattr(loss, f.name)
        if f.name in ("kind", "kl_estimator"):
            if not isinstance(value, str | None):
                raise InvalidRequestError(f"{f.name} of a loss must be text, got {value!r}")
        elif value is not None or f.default is not None:
            _check_number(f"{f.name} of loss {loss.kind}", value)
    loss_table({0: loss}, 1)


def check_optimizer(spec: OptimizerSpec) -> None:
    """Raises InvalidRequestError: an unknown schedule, a setting that is no number, or one by which a step would come to NaN."""
    if not isinstance(spec, OptimizerSpec):
        raise InvalidRequestError(f"an optimizer must be an OptimizerSpec, got {type(spec).__name__}")
    for f in fields(spec):
        value = getattr(spec, f.name)
        if f.name == "schedule":
            if not isinstance(value, str):
                raise InvalidRequestError(f"the schedule of an optimizer must be text, got {value!r}")
        elif f.name in ("warmup_steps", "decay_steps", "first_step"):
            _check_count(f"{f.name} of an optimizer", value)
        else:
            _check_number(f"{f.name} of an optimizer", value)
            if f.name in ("beta1", "beta2") and not 0 <= value < 1:
                raise InvalidRequestError(f"{f.name} of an optimizer is {value}: must be in [0, 1)")
    if spec.eps <= 0 or spec.grad_clip_norm < 0:
        raise InvalidRequestError(f"eps of an optimizer must be above 0 and grad_clip_norm not negative, got {spec.eps} and {spec.grad_clip_norm}")
    hyperparameters(spec)


def check_spec(spec: RunSpec) -> None:
    """Raises InvalidRequestError: a run's name, adapter, optimizer, loss or weight that is none."""
    if not isinstance(spec, RunSpec):
        raise InvalidRequestError(f"a run must be a RunSpec, got {type(spec).__name__}")
    if not isinstance(spec.run_id, str):
        raise InvalidRequestError(f"a run_id must be text, got {spec.run_id!r}")
    if not isinstance(spec.lora, LoraSpec):
        raise InvalidRequestError(f"the adapter of run {spec.run_id} must be a LoraSpec, got {type(spec.lora).__name__}")
    if flags := [f.name for f in fields(spec.lora) if f.type in (bool, "bool") and not isinstance(getattr(spec.lora, f.name), bool)]:
        raise InvalidRequestError(f"{flags[0]} of run {spec.run_id} must be true or false, got {getattr(spec.lora, flags[0])!r}")
    _check_count(f"rank of run {spec.run_id}", spec.lora.rank, least=1)
    _check_number(f"alpha of run {spec.run_id}", spec.lora.alpha)
    _check_number(f"weight of run {spec.run_id}", spec.weight)
    _check_count(f"first_seq of run {spec.run_id}", spec.first_seq)
    if spec.weight <= 0:
        raise InvalidRequestError(f"weight of run {spec.run_id} is {spec.weight}: must be above 0")
    check_optimizer(spec.optimizer)
    check_loss(spec.loss)


def check_seq(seq: object) -> None:
    """Raises InvalidRequestError: an operation's number that is none."""
    if seq is not None:
        _check_count("seq", seq)


def check_state(state: AdapterState) -> None:
    """Raises StateConflictError: no AdapterState of arrays by side and module. Whether those fit the model is the residency's to say."""
    if not isinstance(state, AdapterState):
        raise StateConflictError(f"a run's state must be an AdapterState, got {type(state).__name__}")
    try:
        _check_count("num_steps of a run's state", state.num_steps)
    except InvalidRequestError as error:
        raise StateConflictError(str(error)) from error
    for name, tree in zip(("adapter", "first moment", "second moment"), state[:3], strict=True):
        leaves = list(tree.values()) if isinstance(tree, Mapping) and set(tree) <= {"a", "b"} else [None]
        for side in leaves:
            if not isinstance(side, Mapping) or not all(isinstance(k, str) and isinstance(leaf, np.ndarray) for k, leaf in side.items()):
                raise StateConflictError(f"the {name} of a run's state must be arrays by side and module, got {type(tree).__name__}")
    if "a" not in state.params:
        raise StateConflictError("the adapter of a run's state has no side a")


def _check_number(name: str, value: Any) -> None:
    try:
        is_one = not getattr(value, "ndim", 0) and math.isfinite(value) and abs(value) <= _MAX_FLOAT
    except (TypeError, ValueError, OverflowError):
        is_one = False
    if not is_one:
        raise InvalidRequestError(f"{name} must be a finite number, got {value!r}")


def _check_count(name: str, value: Any, *, least: int = 0) -> None:
    try:
        is_one = least <= operator.index(value) <= _MAX_INT
    except TypeError:
        is_one = False
    if not is_one:
        raise InvalidRequestError(f"{name} must be an integer, at least {least}, got {value!r}")


# ---- batches ------------------------------------------------------------------------------------------------------------------------------


def _check_range(name: str, array: Any, least: int, below: int) -> None:
    if len(array) and not (least <= array.min() and array.max() < below):
        raise InvalidRequestError(f"{name} must be in [{least}, {below}), got {array.min()} .. {array.max()}")


def _check_dtypes(batch: PlannedBatch) -> None:
    """What the planner makes is exact; what somebody has made of it since need not be."""
    owners = [("entries", batch.entries), *((f"part {number}", part.entries) for number, part in enumerate(batch.parts))]
    for owner, entries in owners:
        count = len(entries) if isinstance(entries, Entries) and isinstance(entries.target_M, np.ndarray) and entries.target_M.ndim else -1
        if wrong := [f.name for f in fields(Entries) if not is_exact(getattr(entries, f.name, None), entry_dtype(f.name), count)]:
            raise InvalidRequestError(f"{owner} of a planned batch: {', '.join(wrong)} must be [M], of the dtype of noria.types.Entries")
    for number, part in enumerate(batch.parts):
        count = len(part.ids_T) if is_exact(part.ids_T, np.int32) else -1
        if wrong := [name for name in ("ids_T", "depth_T", "end_T") if not is_exact(getattr(part, name), np.int32, count)]:
            raise InvalidRequestError(f"part {number} of a planned batch: {', '.join(wrong)} must be int32 [T]")
    for name, column in batch.columns.items() if isinstance(batch.columns, Mapping) else [("columns", batch.columns)]:
        if name not in COLUMNS or not is_exact(column, COLUMNS[name], len(batch.entries)):
            raise InvalidRequestError(
                f"column {name} of a planned batch must be {COLUMNS.get(name)}, one per entry: plan it with the learner's planner"
            )


def _check_places(batch: PlannedBatch) -> None:
    """Every entry stands in one part, and is there what it is in the batch."""
    sizes = [len(part.entries) for part in batch.parts]
    places = batch.places if isinstance(batch.places, tuple) else ()
    shapes = [place.shape if getattr(place, "dtype", np.dtype(bool)).kind in "iu" else None for place in places]
    if shapes != [(size,) for size in sizes]:
        raise InvalidRequestError(f"the places of a planned batch must be integers, one per entry of each of its {len(sizes)} parts: plan it anew")
    place_M = np.concatenate(batch.places)
    if not np.array_equal(np.sort(place_M), np.arange(len(batch.entries))):
        raise InvalidRequestError(f"a planned batch of {len(batch.entries)} entries does not have each of them in one part, once")
    for f in fields(Entries):
        together = np.concatenate([getattr(part.entries, f.name) for part in batch.parts])
        if f.name != "predict_from_M" and together.tobytes() != getattr(batch.entries, f.name)[place_M].tobytes():
            raise InvalidRequestError(f"{f.name} of a planned batch is not what its parts have: plan it anew")


def _check_fit(batch: PlannedBatch, sizes: Sizes) -> None:
    """A microbatch holds each part, and the path each chunk of a walk."""
    shape, walk = sizes.shape, batch.walk
    for part in batch.parts:
        if not shape.holds(part.num_tiles, part.num_entry_tiles * ENTRY_TILE):
            raise TreeTooLargeError(
                f"a part of {len(part.ids_T)} positions and {len(part.entries)} entries exceeds this learner's microbatch of {shape.num_positions} "
                f"positions and {shape.num_entries} entries: plan the batch for it, or raise learner.max_positions"
            )
    if walk is None:
        return
    _check_walk(batch, walk)
    if not walk_fits(walk, shape, sizes.path_positions):
        raise TreeTooLargeError(
            f"a walk over a path of {longest_path(walk)} positions in {walk.num_blocks} tiles, this learner walks {sizes.path_positions}: "
            "plan the batch for it, or raise learner.path_positions"
        )


def _check_walk(batch: PlannedBatch, walk: object) -> None:
    """Its chunks are the batch's parts, and each is entered at most once, then pulled or dropped once."""
    if not isinstance(walk, ReplayPlan) or not isinstance(batch.prefix_gradient, str) or batch.prefix_gradient not in get_args(PrefixGradient):
        raise InvalidRequestError(f"a walk must be a ReplayPlan, exact or stop, got {type(walk).__name__}, {batch.prefix_gradient!r}")
    if not isinstance(walk.chunks, tuple) or not all(
        isinstance(c, Chunk) and isinstance(c.first_block, int) and c.first_block >= 0 for c in walk.chunks
    ):
        raise InvalidRequestError("the chunks of a walk must be Chunks, each behind 0 or more blocks: plan it anew")
    if len(walk.chunks) != len(batch.parts) or any(part is not chunk.piece for part, chunk in zip(batch.parts, walk.chunks, strict=True)):
        raise InvalidRequestError("the parts of a planned batch are not the chunks of its walk: plan it anew")
    visits: list[list[object]] = [[] for _ in walk.chunks]
    for visit in walk.visits if isinstance(walk.visits, tuple) else ():
        if not isinstance(visit, Visit) or not isinstance(visit.chunk, int) or not 0 <= visit.chunk < len(visits):
            raise InvalidRequestError(f"a walk of {len(visits)} chunks has the visit {visit!r}: plan it anew")
        visits[visit.chunk].append(visit.action)
    if not all(actions in (["pull"], ["enter", "pull"], ["enter", "drop"]) for actions in visits):
        raise InvalidRequestError("a walk does not enter each chunk at most once, and then pull or drop it: plan it anew")


def _check_positions(parts: Sequence[Piece], sizes: Sizes) -> None:
    """Ids, places in the tree, and which position predicts: of all parts at once."""
    length_P = np.array([len(part.ids_T) for part in parts])
    if not length_P.all():
        raise InvalidRequestError("a part of a batch has no positions")
    _check_range("ids_T", np.concatenate([part.ids_T for part in parts]), 0, sizes.vocab_size)
    _check_range("depth_T", np.concatenate([part.depth_T for part in parts]), 0, _MAX_INT)
    here_T = np.concatenate([np.arange(length) for length in length_P])
    end_T = np.concatenate([part.end_T for part in parts])
    if (end_T <= here_T).any() or (end_T > np.repeat(length_P, length_P)).any():
        raise InvalidRequestError("end_T of a part is not behind its position, or beyond the part")
    from_M, num_entries_P = np.concatenate([part.entries.predict_from_M for part in parts]), [len(part.entries) for part in parts]
    is_inside_M = (from_M >= 0) & (from_M < np.repeat(length_P, num_entries_P))
    if not is_inside_M.all():
        raise InvalidRequestError(f"predict_from_M of an entry is {from_M[np.argmin(is_inside_M)]}, outside the positions of its part")
    sequence_M, part_M = np.concatenate([part.entries.sequence_M for part in parts]), np.repeat(np.arange(len(parts)), num_entries_P)
    starts = np.flatnonzero(np.append(True, (np.diff(sequence_M) != 0) | (np.diff(part_M) != 0)))
    if len(np.unique(np.stack((part_M[starts], sequence_M[starts])), axis=1).T) < len(starts):
        raise InvalidRequestError("the entries of a sequence must stand together in each part (sequence_M)")


def _check_entries(entries: Entries, sizes: Sizes) -> None:
    _check_range("target_M", entries.target_M, 0, sizes.vocab_size)
    is_warm_M = (entries.temperature_M > 0) & np.isfinite(entries.temperature_M)
    if not is_warm_M.all():
        raise InvalidRequestError(f"temperature_M must be finite and above 0, got {entries.temperature_M[np.argmin(is_warm_M)]}")
