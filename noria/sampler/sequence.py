"""What the sampler works on: a sequence (one request on its way), a prefill (one prompt's K/V on their way), and the two kinds of dispatch.

    waiting ──admitted──▶ prefilling ──all pages before its last id filled──▶ decoding ──stop, max_tokens──▶ finished
       ▲                      │                                                  │
       └──────────────────────┴── preempted: gives its pages to others, and keeps what it has sampled

The positions of a prompt but its last are prefilled (K/V only); the last prompt id is the first decode input. So decoding is the only program that
samples, and a prompt is prefilled once, whoever asks first.
"""

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from noria.sampler.pages import PAGE, Namespace, Node, PageMove
from noria.types import Completion, FinishReason, Ids, SampleRequest, TopIds

LANES_PER_TILE = 8
"""Lanes of a tile; a tile's lanes use one adapter slot."""

CHUNK = 32
"""Positions of a prefill row."""

BLOCK_PAGES = 4
"""Pages that decoding's attention reads at once; a shared prefix is a multiple of it. Larger blocks are no faster for long rows, half as fast for
rows of 64, and share less."""

MAX_STOP_IDS = 16
"""Stop ids of one request: the width of a device array. Room for as many as there may be stop texts, which may all be of one token, beside the ids
that end a turn."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request and all its state. Created on the event loop, then touched by the device thread only.

    stop_ids: the request's and the model's end-of-text id, sorted. deadline_s: by the engine's clock; then it is `expired`. is_stopped: its text has
    come to contain a stop text, with the last sampled token. num_mixed: tokens sampled over K/V of another version. prompt_logprobs, prompt_top: of
    the prompt's ids but the first, if the request wants them, filled as its rows run. arrival, turn: its number among all that were submitted, and
    among all that were admitted, which it keeps when preempted; then num_filled is how many positions it had filled. num_overtaken: requests of other
    tenants that were admitted into pages that it waited for, or had as room to grow. held_version: the one that it keeps until its next tokens are
    sampled, whatever is published. last_load: number of the last load of a page that it waits for.
    Set at admission: namespace, kv_version (the version of all its K/V so far, None if mixed), chain (the shared full pages it keeps), source (a
    shared page to be copied into the first own page before decoding), own_pages (grown as it decodes), table (chain's pages, then own pages, in
    position order), block_ends (the last of each BLOCK_PAGES pages of the chain: who has it in common has all before it in common, but for doubles).
    """

    request: SampleRequest
    stop_ids: Ids
    sampled_ids: list[int] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[TopIds] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top: list[TopIds] = field(default_factory=list)
    deadline_s: float = math.inf
    is_stopped: bool = False
    num_mixed: int = 0
    arrival: int = 0
    turn: int = -1
    num_filled: int = 0
    num_overtaken: int = 0
    held_version: int | None = None
    last_load: int = 0
    namespace: Namespace = ("", 0)
    kv_version: int | None = None
    chain: tuple[Node, ...] = ()
    source: Node | None = None
    own_pages: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    block_ends: tuple[int, ...] = ()

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
        return self.num_pages_for(self.num_remaining)

    def num_pages_for(self, num_steps: int) -> int:
        """Pages of all positions up to those that it feeds in that many more steps."""
        return -(-(self.position + min(num_steps, self.num_remaining)) // PAGE)

    @property
    def wants_scores(self) -> bool:
        """Log-probabilities of its prompt are still to be found, by prefilling all of it."""
        return self.request.wants_prompt and len(self.prompt_logprobs) < len(self.request.prompt_ids) - 1

    @property
    def is_prefilled(self) -> bool:
        """Every shared page it builds on has been filled."""
        last = self.source or (self.chain[-1] if self.chain else None)
        return last is None or last.is_filled

    @property
    def is_finished(self) -> bool:
        return bool(self.sampled_ids) and (self._has_stop or self.num_remaining == 0)

    @property
    def filled_ids(self) -> Ids:
        """The ids whose K/V its next decode step reads: all but the last so far. Once it decodes, they lie in the table's pages."""
        return self.request.prompt_ids + tuple(self.sampled_ids[:-1]) if self.sampled_ids else self.request.prompt_ids[:-1]

    def append(self, ids: Many[int], behavior_logprobs: Many[float], version: int, top: Many[TopIds] = ()) -> None:
        """Record what one dispatch sampled."""
        if self.position == 0:
            self.kv_version = version  # no K/V yet that could be of another
        self.sampled_ids.extend(ids)
        self.behavior_logprobs.extend(behavior_logprobs)
        self.versions.extend([version] * len(ids))
        self.top.extend(top)
        if version != self.kv_version:
            self.kv_version = None
            self.num_mixed += len(ids)

    def completion(self) -> Completion:
        """The finished request's answer."""
        reason: FinishReason = "stop" if self._has_stop else "length"
        return Completion(
            tuple(self.sampled_ids),
            tuple(self.behavior_logprobs),
            tuple(self.versions),
            reason,
            top=tuple(self.top),
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_top=tuple(self.prompt_top),
            is_trainable=self.request.params.is_trainable,
            num_mixed=self.num_mixed,
        )

    @property
    def _has_stop(self) -> bool:
        return self.is_stopped or self.sampled_ids[-1] in self.stop_ids


@dataclass(eq=False, slots=True)
class Prefill:
    """The K/V of a prompt's positions `next_position` to `stop` (exclusive) that no page holds yet: independent of the request that asked first.

    nodes: the pages to be filled, in order; the first begins at position `start`. table: all pages from position 0 on. parent: the node before them,
    filled by an earlier prefill at the latest. source: a page whose first ids agree, to be copied into the first node. last_load: as of a sequence.
    scored: the request that wants the log-probabilities of these ids, whose alone the prefill is then.
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
    last_load: int
    scored: Sequence | None = None

    @property
    def num_remaining(self) -> int:
        """Positions still to be filled."""
        return self.stop - self.next_position

    @property
    def stop(self) -> int:
        return self.start + PAGE * (len(self.nodes) - 1) + len(self.nodes[-1].ids) if self.nodes else self.start

    @property
    def is_scored(self) -> bool:
        return self.scored is not None

    @property
    def can_run(self) -> bool:
        """What it builds on has been filled, or is filled by rows before its own."""
        return (self.parent is None or self.parent.is_filled) and (self.source is None or self.source.is_filled)


class PageCopy(NamedTuple):
    """Copy a whole page on the device, before the dispatch."""

    source: int
    target: int


class PrefillRow(NamedTuple):
    """Up to CHUNK consecutive positions of one prompt: ids, the position of the first, all pages from position 0 to the last, adapter slot.

    targets: the ids that follow each position, if `scored` wants their log-probabilities, else none; then all rows of the dispatch have some.
    num_top: most likely ids wanted beside them.
    """

    ids: Ids
    start: int
    table: list[int]
    slot: int
    targets: Ids = ()
    num_top: int = 0
    scored: Sequence | None = None


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
    Without rows it only moves pages.

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
