"""A batch on its way into the learner: which executor takes it, in which parts, and what they cost. Pure NumPy; made off the device thread.

    TokenTree ──▶ cut into pieces, each within one microbatch                      packed
             └──▶ a walk over chunks, which keeps one path's keys and values      replay (rl/chunks.py)

The choice is made before anything is allocated, from the sizes alone: a batch is packed if every path of its tree fits on the largest axis, and
walked if not, or if repeating its heads piece by piece would cost more than walking; a walk's path must fit in the positions set aside for it. The
plan depends on nothing but the batch and the server's sizes, so a run trains to the same bits whatever its neighbours.

    M entry: those of a batch are ordered by sequence, and by place within one (the order of a TokenTree)     T position     P part
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from noria.errors import InvalidRequestError, TreeTooLargeError
from noria.learner.arrays import exact, exact_piece, exact_tree
from noria.learner.memory import walk_blocks
from noria.model.config import ModelConfig
from noria.rl.chunks import PrefixGradient, ReplayPlan, plan_replay
from noria.rl.packing import MicrobatchShape, cut, take_entries
from noria.types import ENTRY_TILE, TILE, Entries, FloatArray, Ids, IntArray, Piece, TokenTree

Column: TypeAlias = FloatArray | IntArray | npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.integer]

COLUMNS: Final[Mapping[str, type[np.float32] | type[np.int32] | type[np.bool_]]] = {
    "reference_logprobs_M": np.float32,
    "returns_M": np.float32,
    "behavior_values_M": np.float32,
    "pair_M": np.int32,
    "staleness_M": np.int32,
    "is_outside_M": np.bool_,
}
"""The optional inputs of losses (`rl.losses.LossInputs`), each with its dtype: that of a microbatch's column, whoever's entries stand in it."""

PULL_PASSES, SCORE_PASSES = 2, 1
"""Passes over the layers' products: the pull recomputes them, and multiplies by each transposed weight."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch as the learner executes it. parts: its pieces, or its walk's chunks. places: of each part's entries in the batch's order.

    entries: all, in that order. columns: optional inputs of the loss by their names in COLUMNS, [M]. walk: None for a packed batch; prefix_gradient:
    of the walk.
    """

    parts: tuple[Piece, ...]
    places: tuple[Places, ...]
    entries: Entries
    columns: Mapping[str, Column]
    walk: ReplayPlan | None = None
    prefix_gradient: PrefixGradient = "exact"

    @property
    def num_positions(self) -> int:
        """Positions of all parts, repeated ones included."""
        return sum(len(part.ids_T) for part in self.parts)

    def holds_whole(self, group_M: IntArray) -> bool:
        """Whether all entries of equal number in group_M stand in one part."""
        if len(self.parts) == 1:
            return True
        groups_P = [np.unique(group_M[place_M]) for place_M in self.places]
        return sum(map(len, groups_P)) == len(np.unique(group_M))


@final
@dataclass(frozen=True, slots=True)
class BatchPlanner:
    """Plans batches for a learner with these sizes. shape: its largest microbatch. path_positions: the longest path it walks, 0 for none.

    Any thread.
    """

    shape: MicrobatchShape
    path_positions: int = 0

    @property
    def longest(self) -> int:
        """Positions of the longest sequence that can be trained."""
        return max(self.shape.num_positions, self.path_positions)

    def plan(
        self, batch: TokenTree | Sequence[Piece], *, columns: Mapping[str, Column] | None = None, prefix_gradient: PrefixGradient = "exact"
    ) -> PlannedBatch:
        """The batch for the executor that suits it. columns: see PlannedBatch.

        Raises TreeTooLargeError: a path, or a piece that was cut elsewhere, is too long for this learner. InvalidRequestError: what is no batch, a
        column that is none, of another length, or of numbers that its dtype cannot hold.
        """
        given = dict(columns or {})
        if not isinstance(batch, TokenTree):
            if not isinstance(batch, Sequence):
                raise InvalidRequestError(f"a batch must be a TokenTree, Pieces or a PlannedBatch, got {type(batch).__name__}")
            return self._packed(tuple(map(exact_piece, batch)), given)
        batch = exact_tree(batch)
        if not len(batch.entries):
            return PlannedBatch((), (), batch.entries, {})
        if prefix_gradient == "stop":
            return self._walked(batch, given, prefix_gradient)
        try:
            packed = self._packed(cut(batch, self.shape), given)
        except TreeTooLargeError as error:
            if not self.path_positions:
                raise TreeTooLargeError(f"{error}; or set learner.path_positions, for longer ones to be walked") from error
            return self._walked(batch, given, prefix_gradient)
        if not self.path_positions or len(packed.parts) == 1:
            return packed
        walked = self._walk(batch, prefix_gradient)
        packed_passes = (SCORE_PASSES + PULL_PASSES) * sum(part.num_tiles * TILE for part in packed.parts)
        is_cheaper = self._path_fits(walked) and self._passes(walked) < packed_passes
        return of_walk(batch, walked, given, prefix_gradient) if is_cheaper else packed

    def _packed(self, pieces: tuple[Piece, ...], columns: dict[str, Column]) -> PlannedBatch:
        for piece in pieces:
            if not self.shape.holds(piece.num_tiles, piece.num_entry_tiles * ENTRY_TILE):
                raise TreeTooLargeError(
                    f"a piece of {len(piece.ids_T)} positions and {len(piece.entries)} entries exceeds this learner's microbatch of "
                    f"{self.shape.num_positions} positions and {self.shape.num_entries} entries: cut the batch for it, or raise learner.max_positions"
                )
        together = _joined([piece.entries for piece in pieces])
        order = np.argsort(together.sequence_M, kind="stable")
        place_M = np.empty_like(order)
        place_M[order] = np.arange(len(order))
        places = np.split(place_M, np.cumsum([len(piece.entries) for piece in pieces])[:-1]) if pieces else []
        entries = take_entries(together, order)
        return PlannedBatch(pieces, tuple(places), entries, _checked(columns, len(entries)))

    def _walk(self, tree: TokenTree, prefix_gradient: PrefixGradient) -> ReplayPlan:
        return plan_replay(tree, self.shape.num_positions, prefix_gradient)

    def _walked(self, tree: TokenTree, columns: dict[str, Column], prefix_gradient: PrefixGradient) -> PlannedBatch:
        walk = self._walk(tree, prefix_gradient)
        if not self._path_fits(walk):
            raise TreeTooLargeError(
                f"the tree has a path of {longest_path(walk)} positions in {walk.num_blocks} tiles, this learner walks {self.path_positions}: "
                "raise learner.path_positions, or shorten the run's episodes"
            )
        for chunk in walk.chunks:
            if not self.shape.holds(chunk.piece.num_tiles, chunk.piece.num_entry_tiles * ENTRY_TILE):
                raise TreeTooLargeError(
                    f"a chunk has {len(chunk.piece.entries)} entries, a microbatch {self.shape.num_entries}: raise learner.max_positions"
                )
        return of_walk(tree, walk, columns, prefix_gradient)

    def _path_fits(self, walk: ReplayPlan) -> bool:
        return walk_fits(walk, self.shape, self.path_positions)

    def _passes(self, walk: ReplayPlan) -> int:
        """Positions times passes of a walk: each of its visits has a microbatch to itself."""
        cost = {"enter": SCORE_PASSES, "pull": SCORE_PASSES + PULL_PASSES, "drop": 0}
        return sum(cost[visit.action] * self.shape.dispatched(walk.chunks[visit.chunk].piece.num_tiles) for visit in walk.visits)


def walk_fits(walk: ReplayPlan, shape: MicrobatchShape, path_positions: int) -> bool:
    """Whether a learner with such chunks and paths can walk it: a path has room for a whole chunk behind its last (`memory.walk_blocks`)."""
    num_blocks = max(chunk.first_block for chunk in walk.chunks) + shape.num_tiles
    return longest_path(walk) <= path_positions and num_blocks <= walk_blocks(path_positions, shape)


def longest_path(walk: ReplayPlan) -> int:
    """Positions of the longest sequence in it."""
    return max(int(np.max(chunk.piece.depth_T)) for chunk in walk.chunks) + 1


def of_walk(
    tree: TokenTree, walk: ReplayPlan, columns: Mapping[str, Column] | None = None, prefix_gradient: PrefixGradient = "exact"
) -> PlannedBatch:
    """A tree with its walk, whatever its length. columns: see PlannedBatch. Raises InvalidRequestError: as `BatchPlanner.plan`."""
    parts, places = tuple(chunk.piece for chunk in walk.chunks), tuple(chunk.entry_M for chunk in walk.chunks)
    return PlannedBatch(parts, places, tree.entries, _checked(dict(columns or {}), len(tree.entries)), walk, prefix_gradient)


def sequence(ids: Ids) -> Piece:
    """One plain sequence as a piece: an entry for every id but the first, temperature 1."""
    length = len(ids) - 1
    zeros, floats = np.zeros(length, np.int32), np.zeros(length, np.float32)
    count = np.arange(length, dtype=np.int32)
    entries = Entries(count, np.array(ids[1:], np.int32), np.ones(length, np.float32), floats, floats, floats, zeros, zeros)
    return Piece(np.array(ids[:-1], np.int32), count, np.full(length, length, np.int32), entries)


def _joined(parts: Sequence[Entries]) -> Entries:
    if not parts:
        ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return Entries(ints, ints, floats, floats, floats, floats, ints, ints)
    return Entries(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Entries)})


def _checked(columns: dict[str, Column], num_entries: int) -> dict[str, Column]:
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise InvalidRequestError(f"a batch has no column {unknown[0]!r}; known: {', '.join(COLUMNS)}")
    return {name: exact(f"column {name}, one per entry,", column, COLUMNS[name], num_entries) for name, column in columns.items()}


@final
class Costs:
    """Estimated FLOPs of a model's passes: matrix products of layers and head, and attention. Ratios matter, so adapters and norms are left out."""

    def __init__(self, config: ModelConfig) -> None:
        heads = config.num_heads * config.head_dim
        per_layer = config.hidden_size * (2 * heads + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size)
        self._position = 2.0 * config.num_layers * per_layer
        self._pair = 4.0 * config.num_layers * heads
        self._entry = 2.0 * config.hidden_size * config.vocab_size

    def score(self, part: Piece, path_positions: int = 0) -> float:
        """Of a forward pass over a part, behind a path of so many positions."""
        pairs = float((part.end_T - np.arange(len(part.end_T))).sum()) + float(path_positions) * len(part.ids_T)
        return self._position * part.num_tiles * TILE + self._pair * pairs + self._entry * len(part.entries)

    def pull(self, part: Piece, path_positions: int = 0) -> float:
        """Of the backward pass."""
        return PULL_PASSES * self.score(part, path_positions)

    @property
    def tile(self) -> float:
        """Of the forward pass over one tile: what a barrier is charged."""
        return self._position * TILE
