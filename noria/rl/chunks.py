"""Chunks: a token tree that fits in no microbatch, as a walk over parts that do.

        enter the root ──▶ enter a node ──▶ pull a chunk of small subtrees ──▶ ... ──▶ pull the node ──▶ pull the root

Depth first. On the way down a node's chunks are entered: forward, and only their keys and values stay, as a stretch of the path. At the leaves, and
for whole subtrees that fit in one chunk together, a chunk is pulled at once. On the way up a node's chunks are pulled, last first, with what their
descendants owe their keys and values. What is alive at any time is one path and one chunk, so the number of branches does not appear in it.

Where the last position of a node that branches predicts tokens, it is not part of the path: every chunk below begins with its own copy, so that a
sequence's entries stand together in one chunk wherever its turns do. Positions are repeated, entries never.

With `prefix_gradient = "stop"` (LongStraw's schedule, arXiv 2607.14952) the prefix is a constant: the positions from which, and above which, no entry
is predicted. It is walked in chunks of its own, which are left without being pulled.

Pure NumPy. Deliberately knows nothing of devices: `learner/replay.py` walks.

    T position   M entry   N node   Q sequence   block = tile = 64 positions
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

from noria.rl.packing import take_entries
from noria.types import TILE, IntArray, Piece, TokenTree

Positions: TypeAlias = npt.NDArray[np.integer]
Action: TypeAlias = Literal["enter", "pull", "drop"]
PrefixGradient: TypeAlias = Literal["exact", "stop"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tree: its positions as a piece, after a path of `first_block` blocks, of which the first `num_constant` are the constant prefix.
    entry_M: which of the tree's entries its entries are."""

    piece: Piece
    first_block: int
    entry_M: Positions
    num_constant: int = 0


@dataclass(frozen=True, slots=True)
class Visit:
    """One stop of the walk. enter: forward, keys and values become part of the path. pull: forward and backward, what was entered leaves the path.
    drop: what was entered leaves the path, and what is owed to it is forgotten."""

    action: Action
    chunk: int


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The walk over a tree. chunks in depth-first order; each is pulled or dropped once, after all chunks below it. num_blocks: of the longest path,
    with the chunk at its end.
    """

    chunks: tuple[Chunk, ...]
    visits: tuple[Visit, ...]
    num_blocks: int

    @property
    def num_positions(self) -> int:
        """Positions of all chunks, repeated ones included."""
        return sum(len(chunk.piece.ids_T) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Positions of one chunk, ascending, the first num_heads of them (0 or 1) copies; the block of the path at which it stands; the range
    [start, stop) of the layout that lies in it or below it; and how many of the path's blocks are constant."""

    position_T: Positions
    num_heads: int
    first_block: int
    reach: tuple[int, int]
    num_constant: int


def plan_replay(tree: TokenTree, max_positions: int, prefix_gradient: PrefixGradient = "exact") -> ReplayPlan:
    """The walk over `tree` with chunks of at most `max_positions` positions (a multiple of 64, at least 128). Depends on nothing else."""
    assert max_positions % TILE == 0
    assert max_positions >= 2 * TILE
    stretches: list[_Stretch] = []
    visits: list[Visit] = []
    for action, stretch in _walk(_Nodes(tree, prefix_gradient), max_positions):
        if isinstance(stretch, _Stretch):
            stretches.append(stretch)
            visits.append(Visit(action, len(stretches) - 1))
        else:
            visits.append(Visit(action, stretch))
    owner_M = _owners(tree, stretches)
    order = np.argsort(owner_M, kind="stable")
    entries_of = np.split(order, np.searchsorted(owner_M[order], np.arange(1, len(stretches))))
    chunks = tuple(_chunk(tree, stretch, entry_M) for stretch, entry_M in zip(stretches, entries_of, strict=True))
    num_blocks = max((c.first_block + c.piece.num_tiles for c in chunks), default=0)
    return ReplayPlan(chunks, tuple(visits), num_blocks)


@final
class _Nodes:
    """The tree's nodes as the walk sees them. Where the prefix is a constant, a node that belongs to it in part is two."""

    def __init__(self, tree: TokenTree, prefix_gradient: PrefixGradient) -> None:
        self.end_T = tree.end_T
        self.predicts_T = np.zeros(len(tree), bool)
        self.predicts_T[tree.entries.predict_from_M] = True
        self.start: list[int] = []
        self.stop: list[int] = []
        self.is_prefix: list[bool] = []
        self.children: list[list[int]] = []
        self.roots: list[int] = []
        node_of: list[int] = []  # the last of what became of each node of the tree
        for start, stop, parent in zip(tree.node_start_N.tolist(), tree.node_stop_N.tolist(), tree.node_parent_N.tolist(), strict=True):
            above = node_of[parent] if parent >= 0 else -1
            if prefix_gradient == "stop" and (above < 0 or self.is_prefix[above]):
                length = int(np.argmax(np.append(self.predicts_T[start:stop], True)))  # of the part that belongs to the prefix
                if length:
                    above = self._add(start, start + length, above, is_prefix=True)
                if length < stop - start:
                    above = self._add(start + length, stop, above, is_prefix=False)
                node_of.append(above)
            else:
                node_of.append(self._add(start, stop, above, is_prefix=False))

    def _add(self, start: int, stop: int, above: int, *, is_prefix: bool) -> int:
        node = len(self.start)
        self.start.append(start)
        self.stop.append(stop)
        self.is_prefix.append(is_prefix)
        self.children.append([])
        (self.children[above] if above >= 0 else self.roots).append(node)
        return node

    def subtree(self, node: int) -> tuple[int, int]:
        """The layout's range [start, stop) of a node and all below it."""
        return self.start[node], int(self.end_T[self.start[node]])


Step: TypeAlias = tuple[Action, "_Stretch | int"]
"""A visit with its new stretch, or with the index of one that was entered."""


@dataclass(frozen=True, slots=True)
class _Below:
    """A sequence of sibling nodes still to be walked. head: the position above them that each of their chunks repeats, if there is one.
    num_constant: of the first_block blocks before them, those of the constant prefix, which come first."""

    nodes: Sequence[int]
    head: tuple[int, ...]
    first_block: int
    num_constant: int


@dataclass(frozen=True, slots=True)
class _Leave:
    """The chunks of a node, to be left last first."""

    chunks: Sequence[int]
    action: Action


def _walk(nodes: _Nodes, max_positions: int) -> Iterator[Step]:
    """The visits in order. An explicit stack: conversations nest as deeply as they have turns."""
    num_stretches = 0
    waiting: list[_Below | _Leave] = [_Below(nodes.roots, (), 0, 0)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Leave):
            yield from ((item.action, index) for index in reversed(item.chunks))
            continue
        together, rest = _first_group(nodes, item, max_positions)
        if rest.nodes:
            waiting.append(rest)
        if together is not None:
            yield "pull", together
            num_stretches += 1
            continue
        node = item.nodes[0]
        own, below = _own_stretches(nodes, item, max_positions)
        entered = list(range(num_stretches, num_stretches + len(own)))
        num_stretches += len(own)
        if not below.nodes:  # the end of a leaf is pulled at once
            entered.pop()
        for number, stretch in enumerate(own):
            yield ("enter" if number < len(entered) else "pull"), stretch
        leave = _Leave(entered, "drop" if nodes.is_prefix[node] else "pull")
        waiting += [leave, below] if below.nodes else [leave]


def _first_group(nodes: _Nodes, below: _Below, max_positions: int) -> tuple[_Stretch | None, _Below]:
    """As many of the first siblings' whole subtrees as fit in one chunk with the head; None if not even the first one does. And what is left."""
    room, count = max_positions - len(below.head), 0
    for node in below.nodes:
        start, stop = nodes.subtree(node)
        if stop - start > room or nodes.is_prefix[node]:
            break
        room -= stop - start
        count += 1
    rest = replace(below, nodes=below.nodes[max(count, 1) :])
    if not count:
        return None, rest
    reach = nodes.subtree(below.nodes[0])[0], nodes.subtree(below.nodes[count - 1])[1]
    return _Stretch(_join(below.head, *reach), len(below.head), below.first_block, reach, below.num_constant), rest


def _own_stretches(nodes: _Nodes, item: _Below, max_positions: int) -> tuple[list[_Stretch], _Below]:
    """The stretches that the first sibling adds to the path, and what is below it."""
    node = item.nodes[0]
    start, stop, children = nodes.start[node], nodes.stop[node], nodes.children[node]
    head = (stop - 1,) if children and nodes.predicts_T[stop - 1] else ()
    own = _join(item.head, start, stop - len(head))
    stretches: list[_Stretch] = []
    block = item.first_block
    for first in range(0, len(own), max_positions):
        part = own[first : first + max_positions]
        num_constant = block if nodes.is_prefix[node] else item.num_constant
        stretches.append(_Stretch(part, 0 if first else len(item.head), block, nodes.subtree(node), num_constant))
        block += -(-len(part) // TILE)
    return stretches, _Below(children, head, block, block if nodes.is_prefix[node] else item.num_constant)


def _join(head: tuple[int, ...], start: int, stop: int) -> Positions:
    return np.concatenate((np.array(head, np.int64), np.arange(start, stop)))


def _owners(tree: TokenTree, stretches: Sequence[_Stretch]) -> Positions:
    """The chunk of each entry. One on a copied position goes where its sequence goes on, or, if it ends there, to the first copy."""
    entries = tree.entries
    first_Q = np.flatnonzero(np.diff(entries.sequence_M, prepend=-1))
    last_Q = np.maximum.reduceat(entries.predict_from_M, first_Q)
    last_M = np.repeat(last_Q, np.diff(first_Q, append=len(entries)))
    by_position = np.argsort(entries.predict_from_M, kind="stable")
    holder_T = np.full(len(tree), -1)
    for index, stretch in enumerate(stretches):
        holder_T[stretch.position_T[stretch.num_heads :]] = index
    owner_M = holder_T[entries.predict_from_M]
    for index, stretch in enumerate(stretches):
        if stretch.num_heads:
            head = int(stretch.position_T[0])
            first, stop = np.searchsorted(entries.predict_from_M, (head, head + 1), sorter=by_position)
            at_head = by_position[first:stop]
            goes_on = (last_M[at_head] >= stretch.reach[0]) & (last_M[at_head] < stretch.reach[1])
            ends = (last_M[at_head] == head) & (owner_M[at_head] < 0)
            owner_M[at_head[goes_on | ends]] = index
    assert (owner_M >= 0).all()
    return owner_M


def _chunk(tree: TokenTree, stretch: _Stretch, entry_M: Positions) -> Chunk:
    old_T = stretch.position_T
    chosen = take_entries(tree.entries, entry_M)

    def renumber(position: Positions) -> IntArray:
        return np.searchsorted(old_T, position).astype(np.int32)

    piece = Piece(
        tree.ids_T[old_T], tree.depth_T[old_T], renumber(tree.end_T[old_T]), replace(chosen, predict_from_M=renumber(chosen.predict_from_M))
    )
    return Chunk(piece, stretch.first_block, entry_M, stretch.num_constant)
