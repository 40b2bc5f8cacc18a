"""Packing: token tree → pieces → microbatches of a closed set of shapes. Every static axis of the learner has its sizes in the table here.

    TokenTree ──cut──▶ pieces of one run ──plan_microbatch──▶ which pieces of which runs ──pack──▶ Microbatch

`cut` sees one run's batch and the largest shape, nothing else, so a run's plan (pieces, tiles, entries and their order) is the same alone or beside
any neighbours. `plan_microbatch` decides only which of these pieces share a pass, never how they are made; a run's pieces always leave in order.
Deliberately knows nothing of devices, losses or fairness: the caller orders the ready runs.

Shape letters: T position, M entry, N node, Q sequence, B tile = attention block, X (query block, key block) pair, U unit (a sequence, by its end),
P piece, W way to cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from noria.errors import ConfigError, TreeTooLargeError
from noria.types import ENTRY_TILE, TILE, Entries, IntArray, Microbatch, Piece, PlacedPiece, TokenTree

NUM_SHAPES = 3
"""Sizes of the axis T where whole axes are computed: the largest, its half and its quarter. Each needs its own programs (score, loss, pull), and a
server may hold 16 of a rank class, with those of walks and of the optimizer. Where only tiles that hold a piece are computed, one size serves."""

MIN_TILES = 2
"""Tiles of the shortest axis. With one, XLA makes plain products of the batched ones over gathered adapters, and their bits differ (JAX 0.10): a run
would train to other bits alone than beside neighbours."""

MAX_CHOICES = 16
"""Runs that one pass is chosen from: those next in line."""

PASS_COST, ENTRY_COST = 64, 0.5
"""What a pass and an entry cost, in positions: a pass is dispatched, and reads the base once, however short it is; an entry goes through the head."""

ENTRIES_PER_POSITION = 2
"""M = 2 T: entries outnumber positions where episodes sampled the same tokens; beyond twice, positions are repeated."""

ENTRY_CHUNK = 32
"""Entries per pass of the head, of which those that hold any are computed: its logits are the largest temporary (32 x 49,152 float32 is 6 MiB). At 32
rows a product is within a tenth of its best speed on CPU, and half a chunk at the end of each pass is what is wasted."""


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """The static sizes of one microbatch: positions T (a multiple of 64), entries M, pairs X (the worst case, one causal sequence).

    is_counted: of its axis, only tiles that hold a piece are computed (on CPU); else all.
    """

    num_positions: int
    num_entries: int
    num_pairs: int
    is_counted: bool = True

    @property
    def num_tiles(self) -> int:
        """Tiles, which are also attention blocks, on the axis."""
        return self.num_positions // TILE

    def holds(self, num_tiles: int, num_entries: int) -> bool:
        """Whether so many tiles and entries fit."""
        return num_tiles <= self.num_tiles and num_entries <= self.num_entries

    def dispatched(self, num_tiles: int) -> int:
        """Positions that a pass over so many tiles computes."""
        return (num_tiles if self.is_counted else self.num_tiles) * TILE


def microbatch_shape(num_positions: int, *, is_counted: bool = True) -> MicrobatchShape:
    """The shape with a T axis of `num_positions`, a multiple of 64 and at least 128. Raises ConfigError otherwise."""
    if num_positions < MIN_TILES * TILE or num_positions % TILE:
        raise ConfigError(f"a microbatch of {num_positions} positions is not a multiple of {TILE} and at least {MIN_TILES * TILE}")
    num_blocks = num_positions // TILE
    return MicrobatchShape(num_positions, ENTRIES_PER_POSITION * num_positions, num_blocks * (num_blocks + 1) // 2, is_counted)


def shapes_up_to(max_positions: int, *, is_counted: bool = True) -> tuple[MicrobatchShape, ...]:
    """A server's closed set of shapes, smallest first: `max_positions`, and where whole axes are computed, its fractions. Raises ConfigError."""
    num_tiles = microbatch_shape(max_positions).num_tiles
    sizes = {max(MIN_TILES, -(-num_tiles // 2**k)) for k in range(1 if is_counted else NUM_SHAPES)}
    return tuple(microbatch_shape(size * TILE, is_counted=is_counted) for size in sorted(sizes))


def cut(tree: TokenTree, shape: MicrobatchShape) -> tuple[Piece, ...]:
    """The pieces of a run's batch, in canonical order (depth first), each fitting `shape` alone; depends on nothing else.

    Of all ways to cut the layout between two sequences it is the one of fewest tiles, then fewest pieces, then fewest positions: a shared head is
    repeated where it must be, or where that saves a tile or a piece, and a tree that fits is one piece. All entries of a sequence are in one piece
    (its path is), each exactly once, in the tree's order: a loss over whole sequences needs no other piece. The paths of an episode that forked may
    lie in several pieces: together they may be longer than any axis. If more entries than M stand on one path, its positions are repeated.

    Raises TreeTooLargeError: a path longer than the axis.
    """
    if not len(tree.entries):
        return ()
    entry_start_Q = np.flatnonzero(np.diff(tree.entries.sequence_M, prepend=-1))
    num_entries_Q = np.diff(entry_start_Q, append=len(tree.entries))
    last_position_Q = np.maximum.reduceat(tree.entries.predict_from_M, entry_start_Q)
    unit_order = np.argsort(last_position_Q, kind="stable")
    last_position_U = last_position_Q[unit_order]
    first_unit_P = _cuts(tree, last_position_U, num_entries_Q[unit_order], shape)

    piece_of_Q = np.empty_like(unit_order)
    piece_of_Q[unit_order] = np.searchsorted(first_unit_P, np.arange(len(unit_order)), side="right") - 1
    piece_M = np.repeat(piece_of_Q, num_entries_Q)
    entries_of = np.split(np.argsort(piece_M, kind="stable"), np.cumsum(np.bincount(piece_M))[:-1])
    units_of = np.split(last_position_U, first_unit_P[1:])
    return tuple(_piece(tree, units, chosen_M) for units, chosen_M in zip(units_of, entries_of, strict=True))


def _cuts(tree: TokenTree, last_position_U: IntArray, num_entries_U: IntArray, shape: MicrobatchShape) -> npt.NDArray[np.integer]:
    """The first unit of each piece [P], ascending. Backwards from the last unit: the best way to cut the units from each on.

    Units [first, stop) need the path above the first one's node, and the layout from there up to the last one's end.
    """
    longest = int(np.max(tree.depth_T[last_position_U])) + 1
    if longest > shape.num_positions:
        raise TreeTooLargeError(
            f"an episode needs {longest} positions, the largest microbatch has {shape.num_positions}: "
            "raise learner.max_positions or shorten the run's episodes"
        )
    start_U = tree.node_start_N[np.searchsorted(tree.node_start_N, last_position_U, side="right") - 1]
    above_U = tree.depth_T[start_U] - start_U
    entry_U = np.append(0, np.cumsum(num_entries_U))
    num_units = len(last_position_U)
    tiles_U, pieces_U, positions_U, stop_U = np.zeros((4, num_units + 1), np.int64)
    for first in range(num_units - 1, -1, -1):
        most = first + np.searchsorted(last_position_U[first:], shape.num_positions - above_U[first])
        most = min(most, np.searchsorted(entry_U, entry_U[first] + shape.num_entries, side="right") - 1)
        stop_W = np.arange(first + 1, max(most, first + 1) + 1)
        size_W = above_U[first] + last_position_U[stop_W - 1] + 1
        ways = tiles_U[stop_W] - (-size_W // TILE), pieces_U[stop_W] + 1, positions_U[stop_W] + size_W
        best = np.lexsort((-stop_W, *ways[::-1]))[0]
        tiles_U[first], pieces_U[first], positions_U[first] = (way[best] for way in ways)
        stop_U[first] = stop_W[best]
    first_P = [0]
    while (stop := int(stop_U[first_P[-1]])) < num_units:
        first_P.append(stop)
    return np.array(first_P)


def _piece(tree: TokenTree, last_position_U: IntArray, chosen_M: npt.NDArray[np.integer]) -> Piece:
    """The piece of consecutive units that end at these positions (ascending): the path to the first, then the layout up to the last.

    All that the layout holds between two ends is on the path to one of the ends up to the second, since every position of a tree is on some path.
    """
    node = int(np.searchsorted(tree.node_start_N, last_position_U[0], side="right")) - 1
    stretches = [np.arange(tree.node_start_N[node], last_position_U[-1] + 1)]
    while (node := int(tree.node_parent_N[node])) >= 0:
        stretches.append(np.arange(tree.node_start_N[node], tree.node_stop_N[node]))
    old_T = np.concatenate(stretches[::-1])
    chosen = take_entries(tree.entries, chosen_M)
    return Piece(
        ids_T=tree.ids_T[old_T],
        depth_T=tree.depth_T[old_T],
        end_T=np.searchsorted(old_T, tree.end_T[old_T]).astype(np.int32),
        entries=replace(chosen, predict_from_M=np.searchsorted(old_T, chosen.predict_from_M).astype(np.int32)),
    )


@dataclass(frozen=True, slots=True)
class ReadyRun:
    """A run with a batch to train: its adapter slot, its pieces in canonical order, and the index of the first piece not yet executed."""

    run_id: str
    slot: int
    pieces: Sequence[Piece]
    next_piece: int = 0


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """One piece of a plan; piece_index: its index among its run's pieces."""

    run_id: str
    slot: int
    piece_index: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """Which pieces share one pass, in order along the axis, and the shape of the pass."""

    shape: MicrobatchShape
    pieces: tuple[PlannedPiece, ...]

    @property
    def num_positions(self) -> int:
        """Positions that are not padding."""
        return sum(len(p.piece.ids_T) for p in self.pieces)

    @property
    def num_entries(self) -> int:
        """Entries of the pieces."""
        return sum(len(p.piece.entries) for p in self.pieces)

    @property
    def dispatched_positions(self) -> int:
        """Positions that the pass computes."""
        return self.shape.dispatched(sum(p.piece.num_tiles for p in self.pieces))

    @property
    def dispatched_entries(self) -> int:
        """Entries that the head computes: whole chunks, each piece's entries from a tile of their own."""
        return -(-sum(p.piece.num_entry_tiles for p in self.pieces) * ENTRY_TILE // ENTRY_CHUNK) * ENTRY_CHUNK

    @property
    def padding_waste(self) -> float:
        """Fraction of the computed positions that is padding, 0 to 1."""
        return 1.0 - self.num_positions / self.dispatched_positions


def plan_microbatch(ready: Sequence[ReadyRun], shapes: Sequence[MicrobatchShape], max_positions: int, *, at_least: int = 1) -> MicrobatchPlan:
    """The next pass of continuous batching: of all ways to take each run's next pieces in order, the one that wastes least of the axis.

    ready: at least one run with a piece left, in the order in which the caller wants them served; `at_least` of the first one's next pieces always
    go, and of ways that waste equally the one that serves earlier runs. shapes: `shapes_up_to(...)`, with the largest shape the pieces were cut for.
    max_positions: how long a pass may be, so that it does not stall decoding; never smaller than those. A run's later piece never overtakes an
    earlier one, here or across passes. An axis stays half empty only where nothing is ready that fits on it.
    """
    waiting = [run for run in ready if run.next_piece < len(run.pieces)][:MAX_CHOICES]
    first = waiting[0].pieces[waiting[0].next_piece :][:at_least]
    num_tiles = sum(piece.num_tiles for piece in first)
    needed = _smallest(shapes, num_tiles, sum(piece.num_entry_tiles for piece in first) * ENTRY_TILE)
    allowed = max(max_positions // TILE, num_tiles if needed.is_counted else needed.num_tiles)
    limit = max((s for s in shapes if s.is_counted or s.num_tiles <= allowed), key=lambda s: s.num_positions)
    limit = replace(limit, num_positions=min(limit.num_tiles, allowed) * TILE)
    fills: dict[tuple[int, int], _Fill] = {(0, 0): _Fill(0, 0, ())}
    for run in waiting:
        fills = _extended(fills, run, limit, at_least=at_least if run is waiting[0] else 0)
    best = min(fills.items(), key=lambda item: _cost(item[0], item[1], shapes))
    chosen = (
        PlannedPiece(run.run_id, run.slot, index, run.pieces[index])
        for run, count in zip(waiting, best[1].counts, strict=True)
        for index in range(run.next_piece, run.next_piece + count)
    )
    (num_tiles, num_entry_tiles), _ = best
    return MicrobatchPlan(_smallest(shapes, num_tiles, num_entry_tiles * ENTRY_TILE), tuple(chosen))


class _Fill(NamedTuple):
    """One way to fill an axis: its positions and entries, and how many pieces of each run so far. Compared in this order."""

    num_positions: int
    num_entries: int
    counts: tuple[int, ...]


def _extended(fills: Mapping[tuple[int, int], _Fill], run: ReadyRun, limit: MicrobatchShape, *, at_least: int) -> dict[tuple[int, int], _Fill]:
    """Each fill, by its (tiles, tiles of entries), with every number from `at_least` on of the run's next pieces that fits; of equal sizes
    the fuller one stays."""
    extended: dict[tuple[int, int], _Fill] = {}
    for (num_tiles, num_entry_tiles), fill in fills.items():
        positions, entries = fill.num_positions, fill.num_entries
        for count in range(len(run.pieces) - run.next_piece + 1):
            if count:
                piece = run.pieces[run.next_piece + count - 1]
                num_tiles, num_entry_tiles = num_tiles + piece.num_tiles, num_entry_tiles + piece.num_entry_tiles
                positions, entries = positions + len(piece.ids_T), entries + len(piece.entries)
                if not limit.holds(num_tiles, num_entry_tiles * ENTRY_TILE):
                    break
            if count >= at_least:
                size, longer = (num_tiles, num_entry_tiles), _Fill(positions, entries, (*fill.counts, count))
                extended[size] = max(extended.get(size, longer), longer)
    return extended


def _cost(size: tuple[int, int], fill: _Fill, shapes: Sequence[MicrobatchShape]) -> tuple[float, tuple[int, ...]]:
    """What a pass costs beside what it trains, per position it trains; then who is left out."""
    num_tiles, num_entry_tiles = size
    shape = _smallest(shapes, num_tiles, num_entry_tiles * ENTRY_TILE)
    idle_entries = -(-num_entry_tiles * ENTRY_TILE // ENTRY_CHUNK) * ENTRY_CHUNK - fill.num_entries
    idle = shape.dispatched(num_tiles) - fill.num_positions + ENTRY_COST * idle_entries
    return (idle + PASS_COST) / fill.num_positions, tuple(-count for count in fill.counts)


def _smallest(shapes: Sequence[MicrobatchShape], num_tiles: int, num_entries: int) -> MicrobatchShape:
    holding = [s for s in shapes if s.holds(num_tiles, num_entries)]
    if not holding:
        largest = max(shapes, key=lambda s: s.num_positions)
        raise TreeTooLargeError(
            f"a piece of {num_tiles} tiles and {num_entries} entries does not fit in the largest microbatch "
            f"({largest.num_tiles} tiles, {largest.num_entries} entries): cut the tree for the largest shape of the same set"
        )
    return min(holding, key=lambda s: s.num_positions)


def pack(plan: MicrobatchPlan) -> Microbatch:
    """The arrays of a planned pass, all of the plan's shape (see `Microbatch` for the padding of each)."""
    shape = plan.shape
    ids_T = np.zeros(shape.num_positions, np.int32)
    depth_T = np.zeros(shape.num_positions, np.int32)
    end_T = np.arange(1, shape.num_positions + 1, dtype=np.int32)
    slot_tile_B = np.zeros(shape.num_tiles, np.int32)
    slot_M = np.zeros(shape.num_entries, np.int32)
    slot_entry_tile_E = np.zeros(shape.num_entries // ENTRY_TILE, np.int32)
    entries = _padding_entries(shape.num_entries)
    placed: list[PlacedPiece] = []
    tile = entry = entry_stop = num_sequences = 0
    for planned in plan.pieces:
        piece, start = planned.piece, tile * TILE
        stop, entry_stop = start + len(piece.ids_T), entry + len(piece.entries)
        ids_T[start:stop] = piece.ids_T
        depth_T[start:stop] = piece.depth_T
        end_T[start:stop] = piece.end_T + start
        slot_tile_B[tile : tile + piece.num_tiles] = planned.slot
        slot_M[entry:entry_stop] = planned.slot
        slot_entry_tile_E[entry // ENTRY_TILE :] = planned.slot
        sequences, sequence_M = np.unique(piece.entries.sequence_M, return_inverse=True)
        for f in fields(Entries):
            getattr(entries, f.name)[entry:entry_stop] = getattr(piece.entries, f.name)
        entries.predict_from_M[entry:entry_stop] += start
        entries.predict_from_M[entry_stop:] = start  # padding reads its own run's piece: no tile of entries ever sees another run's numbers
        entries.sequence_M[entry:entry_stop] = sequence_M + num_sequences
        placed.append(PlacedPiece(planned.run_id, planned.slot, planned.piece_index, tile, piece.num_tiles, entry, len(piece.entries)))
        entry += piece.num_entry_tiles * ENTRY_TILE
        tile, num_sequences = tile + piece.num_tiles, num_sequences + len(sequences)
    query_X, key_X = block_pairs(end_T, num_blocks=tile)
    pair_query_X, pair_key_X = np.zeros((2, shape.num_pairs), np.int32)
    pair_query_X[: len(query_X)], pair_key_X[: len(key_X)] = query_X, key_X
    return Microbatch(
        ids_T=ids_T,
        depth_T=depth_T,
        end_T=end_T,
        slot_tile_B=slot_tile_B,
        pair_query_X=pair_query_X,
        pair_key_X=pair_key_X,
        num_pairs=len(query_X),
        entries=entries,
        slot_M=slot_M,
        slot_entry_tile_E=slot_entry_tile_E,
        num_entries=entry_stop,
        placed=tuple(placed),
    )


def block_pairs(end_T: IntArray, *, num_blocks: int) -> tuple[IntArray, IntArray]:
    """(query block, key block) of every pair that the mask rule leaves non-empty among the first `num_blocks` blocks, by query, then key.

    end_T: [T], T a multiple of 64; the first `num_blocks` blocks hold at least one position each that is not padding. Key block k is seen by the
    query blocks from k to the one that holds the last position any of its keys reaches: all between are non-empty too, since i is.
    """
    last_query_B = (end_T[: num_blocks * TILE].reshape(num_blocks, TILE).max(axis=1) - 1) // TILE
    query_B, key_B = np.arange(num_blocks)[:, None], np.arange(num_blocks)[None, :]
    query_X, key_X = np.nonzero((key_B <= query_B) & (query_B <= last_query_B[None, :]))
    return query_X.astype(np.int32), key_X.astype(np.int32)


def _padding_entries(num_entries: int) -> Entries:
    """Writable entries that train nothing. Their sequence is the last index, which real sequences reach only if there is no padding."""
    ints, floats = np.zeros((3, num_entries), np.int32), np.zeros((3, num_entries), np.float32)
    return Entries(
        predict_from_M=ints[0],
        target_M=ints[1],
        temperature_M=np.ones(num_entries, np.float32),
        behavior_logprobs_M=floats[0],
        advantage_M=floats[1],
        weight_M=floats[2],
        version_M=ints[2],
        sequence_M=np.full(num_entries, num_entries - 1, np.int32),
    )


def take_entries(entries: Entries, index_M: npt.NDArray[np.integer]) -> Entries:
    return Entries(**{f.name: getattr(entries, f.name)[index_M] for f in fields(Entries)})
