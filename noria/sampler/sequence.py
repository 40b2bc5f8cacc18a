"""What the sampler works on: a sequence (one request on its way), a prefill (one prompt's K/V on their way), and the two kinds of dispatch.

    waiting ──admitted──▶ prefilling ──all prompt pages filled──▶ decoding ──stop id, max_tokens──▶ finished

The positions of a prompt but its last are prefilled (K/V only); the last prompt id is the first decode input. So decoding is the only program that
samples, and a prompt is prefilled once, whoever asks first.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from noria.sampler.pages import PAGE, Namespace, Node
from noria.types import Completion, FinishReason, Ids, SampleRequest, TopIds

LANES_PER_TILE = 8
"""Lanes of a tile; a tile's lanes use one adapter slot."""

CHUNK = 32
"""Positions of a prefill row."""

MAX_STOP_IDS = 8
"""Stop ids of one request, the model's end-of-text id included: the width of a device array."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request and all its state. Created on the event loop, then touched by the device thread only.

    stop_ids: the request's and the model's end-of-text id, sorted. Set at admission: namespace, kv_version (the version of all its K/V so far, None
    if mixed), chain (the shared full prompt pages it keeps), source (a shared page to be copied into the first own page before decoding), own_pages,
    table (chain's pages, then own pages, in position order).
    """

    request: SampleRequest
    stop_ids: Ids
    sampled_ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    namespace: Namespace = ("", 0)
    kv_version: int | None = None
    chain: tuple[Node, ...] = ()
    source: Node | None = None
    own_pages: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Position of the next decode input."""
        return len(self.request.prompt_ids) - 1 + len(self.sampled_ids)

    @property
    def input_id(self) -> int:
        """The next decode input: the last id so far."""
        return self.sampled_ids[-1] if self.sampled_ids else self.request.prompt_ids[-1]

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.params.max_tokens - len(self.sampled_ids)

    @property
    def num_table_pages(self) -> int:
        """Pages of all positions that this request may ever feed."""
        return -(-(len(self.request.prompt_ids) + self.request.params.max_tokens - 1) // PAGE)

    @property
    def is_prefilled(self) -> bool:
        """Every shared page it builds on has been filled."""
        last = self.source or (self.chain[-1] if self.chain else None)
        return last is None or last.is_filled

    @property
    def is_finished(self) -> bool:
        return bool(self.sampled_ids) and (self.sampled_ids[-1] in self.stop_ids or self.num_remaining == 0)

    @property
    def filled_ids(self) -> Ids:
        """The ids whose K/V lie in the table's pages once it has finished: all but the last sampled one."""
        return self.request.prompt_ids + tuple(self.sampled_ids[:-1])

    def append(self, ids: Many[int], behavior_logprobs: Many[float], version: int) -> None:
        """Record what one dispatch sampled."""
        self.sampled_ids.extend(ids)
        self.behavior_logprobs.extend(behavior_logprobs)
        self.versions.extend([version] * len(ids))
        if version != self.kv_version:
            self.kv_version = None

    def completion(self) -> Completion:
        """The finished request's answer."""
        reason: FinishReason = "stop" if self.sampled_ids[-1] in self.stop_ids else "length"
        return Completion(tuple(self.sampled_ids), tuple(self.behavior_logprobs), tuple(self.versions), reason)


@dataclass(eq=False, slots=True)
class Prefill:
    """The K/V of a prompt's positions `next_position` to `stop` (exclusive) that no page holds yet: independent of the request that asked first.

    nodes: the pages to be filled, in order; the first begins at position `start`. table: all pages from position 0 on. parent: the node before them,
    filled by an earlier prefill at the latest. source: a page whose first ids agree, to be copied into the first node.
    """

    tenant: str
    run_id: str
    version: int
    ids: Ids
    nodes: list[Node]
    table: list[int]
    parent: Node | None
    source: Node | None
    start: int
    next_position: int

    @property
    def stop(self) -> int:
        return self.start + sum(len(node.ids) for node in self.nodes)

    @property
    def can_run(self) -> bool:
        """What it builds on has been filled, or is filled by rows before its own."""
        return (self.parent is None or self.parent.is_filled) and (self.source is None or self.source.is_filled)


class PageCopy(NamedTuple):
    """Copy a whole page on the device, before the dispatch."""

    source: int
    target: int


class PageMove(NamedTuple):
    """A page of the device and a place in host memory: one is copied to the other before the dispatch."""

    page: int
    place: int


class PrefillRow(NamedTuple):
    """Up to CHUNK consecutive positions of one prompt: ids, the position of the first, all pages from position 0 to the last, adapter slot.

    targets: the ids that follow each position, if their log-probabilities are wanted, else none. num_top: most likely ids wanted beside them.
    """

    ids: Ids
    start: int
    table: list[int]
    slot: int
    targets: Ids = ()
    num_top: int = 0


class LaneTile(NamedTuple):
    """Sequences that use one adapter slot, which holds `version` of their run: up to `DecodeDispatch.lanes_per_tile`.

    num_shared: pages from position 0 on that all of them have in common and nobody writes any more; a multiple of BLOCK_PAGES, 0 for none.
    """

    slot: int
    version: int
    sequences: list[Sequence]
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class PrefillDispatch:
    """Fill pages: stores, loads and copies first, in this order; then all rows at once (a layer writes the K/V of all rows before it attends).

    is_fixed: run it in the one shape of deterministic runs, since a row is of one. stores: from the device to the host; loads: back.
    """

    copies: list[PageCopy]
    rows: list[PrefillRow]
    is_fixed: bool = False
    stores: Many[PageMove] = ()
    loads: Many[PageMove] = ()


@dataclass(frozen=True, slots=True)
class DecodeDispatch:
    """Sample up to the configured number of tokens for every lane. is_fixed, stores, loads: as of a prefill.

    lanes_per_tile: LANES_PER_TILE, or 1 where many runs have few lanes each: then a tile is a lane.
    """

    copies: list[PageCopy]
    tiles: list[LaneTile]
    is_fixed: bool = False
    lanes_per_tile: int = LANES_PER_TILE
    stores: Many[PageMove] = ()
    loads: Many[PageMove] = ()

    @property
    def num_lanes(self) -> int:
        """Lanes in use."""
        return sum(len(tile.sequences) for tile in self.tiles)


class Sampled(NamedTuple):
    """What one lane sampled in one dispatch. top: per token the most likely ids, as many as the request asks for."""

    ids: list[int]
    behavior_logprobs: list[float]
    top: Many[TopIds] = ()


class Scored(NamedTuple):
    """What a prefill row with targets came to: their log-probabilities at temperature 1, and the most likely ids beside each."""

    logprobs: list[float]
    top: Many[TopIds] = ()
