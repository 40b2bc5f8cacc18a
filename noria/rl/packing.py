"""Packing: token tree → pieces → microbatches of a closed set of shapes. Every static axis of the learner has its sizes in the table here.

    TokenTree ──cut──▶ pieces of one run ──plan_microbatch──▶ which pieces of which runs ──pack──▶ Microbatch

`cut` sees one run's batch and the largest shape, nothing else, so a run's plan (pieces, tiles, entries and their order) is the same alone or beside
any neighbours. `plan_microbatch` decides only which of these pieces share a pass, never how they are made; a run's pieces always leave in order.
Deliberately knows nothing of devices, losses or fairness: the caller orders the ready runs.

Shape letters: T position, M entry, N node, Q sequence, B tile = attention block, X (query block, key block) pair, U unit (sequences by their ends).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from noria.errors import ConfigError, TreeTooLargeError
from noria.types import TILE, Entries, IntArray, Microbatch, Piece, PlacedPiece, TokenTree

MICROBATCH_POSITIONS = (128, 256, 512, 768, 1024, 1536, 2048, 4096)
"""Sizes of the axis T, mostly of two significant bits, so that rounding up rarely wastes more than a third. Eight, since a server may hold 16 learner
programs and each size may need two (score, pull)."""

MIN_TILES = 2
"""Tiles of the shortest axis. With one, XLA makes plain products of the batched ones over gathered adapters, and their bits differ (JAX 0.10): a run
would train to other bits alone than beside neighbours."""

ENTRIES_PER_POSITION = 2
"""M = 2 T: entries outnumber positions where episodes sampled the same tokens; beyond twice, positions are repeated."""


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """The static sizes of one microbatch: positions T (a multiple of 64), entries M, pairs X (the worst case, one causal sequence)."""

    num_positions: int
    num_entries: int
    num_pairs: int

    @property
    def num_tiles(self) -> int:
        """Tiles, which are also attention blocks, on the axis."""
        return self.num_positions // TILE

    def holds(self, num_tiles: int, num_entries: int) -> bool:
        """Whether so many tiles and entries fit."""
        return num_tiles <= self.num_tiles and num_entries <= self.num_entries


def microbatch_shape(num_positions: int) -> MicrobatchShape:
    """The shape with a T axis of `num_positions`, a multiple of 64 and at least 128. Raises ConfigError otherwise."""
    if num_positions < MIN_TILES * TILE or num_positions % TILE:
        raise ConfigError(f"a microbatch of {num_positions} positions is not a multiple of {TILE} and at least {MIN_TILES * TILE}")
    num_blocks = num_positions // TILE
    return MicrobatchShape(num_positions, ENTRIES_PER_POSITION * num_positions, num_blocks * (num_blocks + 1) // 2)


def shapes_up_to(max_positions: int) -> tuple[MicrobatchShape, ...]:
    """A server's closed set of shapes, smallest first: the table below `max_positions`, and `max_positions` itself. Raises ConfigError."""
    return tuple(microbatch_shape(t) for t in (*(t for t in MICROBATCH_POSITIONS if t < max_positions), max_positions))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive units [first, stop) that will share a piece: how many positions they need below the current node, and how many entries."""

    first: int
    stop: int
    num_positions: int
    num_entries: int


def cut(tree: TokenTree, shape: MicrobatchShape) -> tuple[Piece, ...]:
    """The pieces of a run's batch, in canonical order (depth first), each fitting `shape` alone; depends on nothing else.

    A subtree that fits together with its path from the root is never cut, so a shared head is repeated only where it must be; neighbouring pieces are
    joined wherever they fit together, so a tree that fits is one piece. All entries of a sequence are in one piece (its path is), each exactly once,
    in the tree's order: a loss over whole sequences needs no other piece. The paths of an episode that forked may lie in several pieces: together
    they may be longer than any axis. If more entries than M stand on one path, its positions are repeated.

    Raises TreeTooLargeError: a path longer than the axis.
    """
    if not len(tree.entries):
        return ()
    entry_start_Q = np.flatnonzero(np.diff(tree.entries.sequence_M, prepend=-1))
    num_entries_Q = np.diff(entry_start_Q, append=len(tree.entries))
    last_position_Q = np.maximum.reduceat(tree.entries.predict_from_M, entry_start_Q)
    unit_order = np.argsort(last_position_Q, kind="stable")
    stretches = _stretches(tree, last_position_Q[unit_order], num_entries_Q[unit_order], shape)

    stretch_of_unit = np.repeat(np.arange(len(stretches)), [s.stop - s.first for s in stretches])
    stretch_of_Q = np.empty_like(stretch_of_unit)
    stretch_of_Q[unit_order] = stretch_of_unit
    entry_order = np.argsort(np.repeat(stretch_of_Q, num_entries_Q), kind="stable")
    entries_of = np.split(entry_order, np.cumsum([s.num_entries for s in stretches])[:-1])
    return tuple(_piece(tree, last_position_Q[unit_order[s.first : s.stop]], chosen_M) for s, chosen_M in zip(stretches, entries_of, strict=True))


def _stretches(tree: TokenTree, last_position_U: IntArray, num_entries_U: IntArray, shape: MicrobatchShape) -> list[_Stretch]:
    """Bottom up: a node's stretches are the sequences that end in it and its children's stretches, joined with the left neighbour where they fit."""
    node_U = np.searchsorted(tree.node_start_N, last_position_U, side="right") - 1
    first_unit_N = np.searchsorted(node_U, np.arange(len(tree.node_start_N) + 1))
    # Stretches below each node, last first (nodes are visited last first); one more for the root above all roots, at index -1.
    below_N: list[list[_Stretch]] = [[] for _ in range(len(tree.node_start_N) + 1)]
    for node in range(len(tree.node_start_N) - 1, -1, -1):
        own = [_Stretch(u, u + 1, 0, int(num_entries_U[u])) for u in range(first_unit_N[node], first_unit_N[node + 1])]
        size = int(tree.node_stop_N[node] - tree.node_start_N[node])
        depth = int(tree.depth_T[tree.node_stop_N[node] - 1]) + 1
        if depth > shape.num_positions:
            raise TreeTooLargeError(
                f"an episode needs {depth} positions, the largest microbatch has {shape.num_positions}: "
                "raise learner.max_positions or shorten the run's episodes"
            )
        joined = _join(own + below_N[node][::-1], shape, head=depth)
        below_N[tree.node_parent_N[node]] += [_Stretch(s.first, s.stop, s.num_positions + size, s.num_entries) for s in reversed(joined)]
    return _join(below_N[-1][::-1], shape, head=0)


def _join(stretches: Sequence[_Stretch], shape: MicrobatchShape, *, head: int) -> list[_Stretch]:
    joined: list[_Stretch] = []
    for s in stretches:
        if joined:
            left = joined[-1]
            both = _Stretch(left.first, s.stop, left.num_positions + s.num_positions, left.num_entries + s.num_entries)
            if head + both.num_positions <= shape.num_positions and both.num_entries <= shape.num_entries:
                joined[-1] = both
                continue
        joined.append(s)
    return joined


def _piece(tree: TokenTree, last_position_U: IntArray, chosen_M: npt.NDArray[np.integer]) -> Piece:
    """The piece of consecutive units that end at these positions (ascending): the path to the first, then the layout up to the last.

    All that the layout holds between two ends is on the path to one of the ends up to the second, since every position of a tree is on some path.
    """
    node = int(np.searchsorted(tree.node_start_N, last_position_U[0], side="right")) - 1
    stretches = [np.arange(tree.node_start_N[node], last_position_U[-1] + 1)]
    while (node := int(tree.node_parent_N[node])) >= 0:
        stretches.append(np.arange(tree.node_start_N[node], tree.node_stop_N[node]))
    old_T = np.concatenate(stretches[::-1])
    chosen = _take(tree.entries, chosen_M)
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
    def padding_waste(self) -> float:
        """Fraction of the axis that is padding, 0 to 1."""
        return 1.0 - self.num_positions / self.shape.num_positions


def plan_microbatch(ready: Sequence[ReadyRun], shapes: Sequence[MicrobatchShape], max_positions: int) -> MicrobatchPlan:
    """The next pass of continuous batching: the first run's next pieces in order, then the other runs' into the room that is left.

    ready: at least one run with a piece left, in the order in which the caller wants them served. shapes: `shapes_up_to(...)`, with the largest shape
    the pieces were cut for. max_positions: how long a pass may be, so that it does not stall decoding; never smaller than one piece, so the first run
    always moves. The plan gets the smallest shape that holds it. A run's later piece never overtakes an earlier one, here or across passes.
    """
    first = next(run.pieces[run.next_piece] for run in ready if run.next_piece < len(run.pieces))
    needed = _smallest(shapes, first.num_tiles, len(first.entries))
    limit = max((s for s in shapes if s.num_positions <= max_positions), key=lambda s: s.num_positions, default=needed)
    limit = max(limit, needed, key=lambda s: s.num_positions)
    chosen: list[PlannedPiece] = []
    num_tiles = num_entries = 0
    for run in ready:
        for index in range(run.next_piece, len(run.pieces)):
            piece = run.pieces[index]
            if not limit.holds(num_tiles + piece.num_tiles, num_entries + len(piece.entries)):
                break
            num_tiles += piece.num_tiles
            num_entries += len(piece.entries)
            chosen.append(PlannedPiece(run.run_id, run.slot, index, piece))
    return MicrobatchPlan(_smallest(shapes, num_tiles, num_entries), tuple(chosen))


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
    entries = _padding_entries(shape.num_entries)
    placed: list[PlacedPiece] = []
    tile = entry = num_sequences = 0
    for planned in plan.pieces:
        piece, start = planned.piece, tile * TILE
        stop, entry_stop = start + len(piece.ids_T), entry + len(piece.entries)
        ids_T[start:stop] = piece.ids_T
        depth_T[start:stop] = piece.depth_T
        end_T[start:stop] = piece.end_T + start
        slot_tile_B[tile : tile + piece.num_tiles] = planned.slot
        slot_M[entry:entry_stop] = planned.slot
        sequences, sequence_M = np.unique(piece.entries.sequence_M, return_inverse=True)
        for f in fields(Entries):
            getattr(entries, f.name)[entry:entry_stop] = getattr(piece.entries, f.name)
        entries.predict_from_M[entry:entry_stop] += start
        entries.sequence_M[entry:entry_stop] = sequence_M + num_sequences
        placed.append(PlacedPiece(planned.run_id, planned.slot, planned.piece_index, tile, piece.num_tiles, entry, len(piece.entries)))
        tile, entry, num_sequences = tile + piece.num_tiles, entry_stop, num_sequences + len(sequences)
    query_X, key_X = block_pairs(end_T, num_blocks=tile)
    pair_query_X, pair_key_X = np.zeros((2, shape.num_pairs), np.int32)
    pair_query_X[: len(query_X)], pair_key_X[: len(key_X)] = query_X, key_X
    return Microbatch(ids_T, depth_T, end_T, slot_tile_B, pair_query_X, pair_key_X, len(query_X), entries, slot_M, entry, tuple(placed))


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


def _take(entries: Entries, index_M: npt.NDArray[np.integer]) -> Entries:
    return Entries(**{f.name: getattr(entries, f.name)[index_M] for f in fields(Entries)})
