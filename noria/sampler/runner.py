"""All arrays of the sampler but the adapters' (`sampler.adapters`): dispatches are packed into arrays, run, and what they gave is taken apart again.

    dispatch ─▶ pages stored on the host ─▶ pages loaded back ─▶ pages copied ─▶ one program (`sampler.programs`) ─▶ what was sampled, or scored

Arrays are packed column by column: filling them lane by lane took longer than a layer. There is one wait for the device per dispatch.

    R row: lanes of one adapter slot (decode), or chunk (prefill)   C position within a row   W lane   P page of a table   X stop id
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from noria.config import SamplerConfig
from noria.model.config import ModelConfig
from noria.model.lora import HostAdapter
from noria.model.placement import BaseParams
from noria.sampler import programs
from noria.sampler.adapters import AdapterSlots, visits_rows
from noria.sampler.draw import Choice
from noria.sampler.host_pages import HostPages
from noria.sampler.page_kernels import Kernel, kernel_of, page_shape
from noria.sampler.paged_attention import regroups_exactly
from noria.sampler.pages import PAGE
from noria.sampler.programs import Lanes, Pool, Resident, Rows, Scores, Tokens
from noria.sampler.sequence import (
    BLOCK_PAGES,
    CHUNK,
    LANES_PER_TILE,
    MAX_STOP_IDS,
    DecodeDispatch,
    PageCopy,
    PrefillDispatch,
    Sampled,
    Scored,
)
from noria.types import TopIds

COPY_WIDTH = 16
"""Page copies of one program run."""

IntArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The closed set of shapes: one program each. lanes: decode widths, multiples of 8. rows: prefill rows, even. Both in ascending order.
    tops: top modules (`lora.TOP_MODULES`) that the adapter slots have room for. kernel: what attends when decoding, None for the device's.

    A lane's and a row's bits do not depend on their place in a dispatch nor on its other lanes and rows; a lane's do depend on the width, since XLA
    orders the sums of a matrix product by the product's shape. So whatever holds a deterministic run's requests has one width and one number of rows.
    """

    lanes: tuple[int, ...]
    rows: tuple[int, ...]
    tops: tuple[str, ...] = ()
    kernel: Kernel | None = None

    @classmethod
    def of(cls, config: SamplerConfig, tops: tuple[str, ...] = ()) -> "Shapes":
        """Few enough to compile quickly, close enough that little is wasted (measured on SmolLM2-135M, two CPU cores)."""
        return cls(lanes=(*(w for w in (8, 32) if w < config.num_lanes), config.num_lanes), rows=(4, 16), tops=tops)

    @property
    def fixed(self) -> tuple[int, int]:
        """Lanes and rows of every dispatch that holds requests of a deterministic run.

        On CPU time grows with width: the smallest width of at least half the lanes, and few rows (SmolLM2-135M, 64 lanes: 8 % slower than free widths
        when all lanes are in use, 2.1 times slower below 8). Accelerators read all weights for any width: the largest of both.
        """
        if jax.default_backend() != "cpu":
            return self.lanes[-1], self.rows[-1]
        return _smallest(self.lanes, self.lanes[-1] // 2), self.rows[0]


@final
class Runner:
    """Owner of all device arrays of the sampler, and of the pages in host memory. Touched by the device thread only."""

    def __init__(
        self, base: BaseParams, model: ModelConfig, config: SamplerConfig, *, rank_classes: tuple[int, ...], shapes: Shapes | None = None
    ) -> None:
        self.shapes = shapes or Shapes.of(config)
        self._model = model
        self._num_steps = config.steps_per_dispatch
        self._num_table_pages = -(-config.max_context // (PAGE * BLOCK_PAGES)) * BLOCK_PAGES
        dtype = base.layers[0]["k"].dtype
        self._kernel = self.shapes.kernel or kernel_of(jax.default_backend(), model.head_dim, dtype)
        pool_shape = (config.num_pages, *page_shape(self._kernel, model.num_kv_heads, model.head_dim))
        self._k: Pool = tuple(jnp.zeros(pool_shape, dtype) for _ in range(model.num_layers))
        self._v: Pool = tuple(jnp.zeros(pool_shape, dtype) for _ in range(model.num_layers))
        self._top = {name: array for name, array in base.stacked.items() if name != "layers"}
        self._layers = base.layers
        self._slots = AdapterSlots(model, config.num_slots, rank_classes, self.shapes.tops)
        self._host = HostPages(model, config.host_mib, dtype, kernel=self._kernel)
        self._used: set[tuple[str, int, int]] = set()

    @property
    def num_programs(self) -> int:
        """Programs used so far, each compiled at its first use (once per process for equal models and sizes)."""
        return len(self._used) + self._slots.num_programs

    @property
    def num_host_places(self) -> int:
        """Pages that host memory has places for."""
        return self._host.num_places

    @cached_property
    def regroups(self) -> bool:
        """Attention may read keys for any lanes at once, and a prefix that lanes have in common once for all of them: no bit changes.

        Only our own loops read so at all.
        """
        if self._kernel != Kernel.LOOPS:
            return False
        heads = self._model.num_heads, self._model.num_kv_heads, self._model.head_dim
        return all(regroups_exactly(heads, width, self._k[0].dtype) for width in self.shapes.lanes)

    def warm_up(self) -> None:
        """Compile every program of the closed set. Takes seconds per program for deep models; without it, the first use compiles."""
        self._k, self._v = self._host.warm_up(self._k, self._v)  # first: it may commit the pools to their device
        for width in self.shapes.lanes:
            for lanes_per_row in (1,) if visits_rows() else (LANES_PER_TILE, 1):
                self._run_decode(self._empty_lanes(width, lanes_per_row))
        for num_rows in self.shapes.rows:
            for is_scored in (False, True):
                self._run_prefill(self._empty_rows(num_rows), is_scored=is_scored)
        self.copy_pages([PageCopy(0, 0)])
        self._slots.warm_up()

    def prefill(self, dispatch: PrefillDispatch) -> list[Scored]:
        """Write the K/V of all rows. Returns when the device is done: what each row with targets came to, in order."""
        self._move_pages(dispatch)
        if not dispatch.rows:
            jax.block_until_ready(self._k[-1])
            return []
        num_rows = self.shapes.fixed[1] if dispatch.is_fixed else _smallest(self.shapes.rows, len(dispatch.rows))
        is_scored = any(row.targets for row in dispatch.rows)
        scores = self._run_prefill(_pack_rows(dispatch, self._empty_rows(num_rows)), is_scored=is_scored)
        if scores is None:
            jax.block_until_ready(self._k[-1])
            return []
        return _scored(dispatch, jax.device_get(scores))

    def decode(self, dispatch: DecodeDispatch) -> list[list[Sampled]]:
        """Sample up to `steps_per_dispatch` tokens for every lane: per tile and lane, what it sampled."""
        self._move_pages(dispatch)
        num_lanes = len(dispatch.tiles) * dispatch.lanes_per_tile
        width = self.shapes.fixed[0] if dispatch.is_fixed else _smallest(self.shapes.lanes, num_lanes)
        lanes = _pack_lanes(dispatch, self._empty_lanes(width, 1 if visits_rows() else dispatch.lanes_per_tile))
        tokens = self._run_decode(lanes)
        return _sampled(dispatch, jax.device_get(tokens if lanes.choice.num_top_W.any() else tokens[:2]))

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy whole pages of all layers. No page is both a source and a target."""
        pending = list(copies)
        for start in range(0, len(pending), COPY_WIDTH):
            page_2X = np.zeros((2, COPY_WIDTH), np.int32)
            part = pending[start : start + COPY_WIDTH]
            page_2X[:, : len(part)] = np.asarray(part, np.int32).T
            self._used.add(("copy", COPY_WIDTH, 0))
            self._k, self._v = programs.copy_pages(self._k, self._v, page_2X)

    def write_slot(self, slot: int, adapter: HostAdapter, scale: float) -> None:
        """Put an adapter into a slot: see `AdapterSlots.write`."""
        self._slots.write(slot, adapter, scale)

    def checksum(self, slot: int) -> int:
        """The integer checksum of the slot's bytes on the device, equal to `lora.checksum` of what was written."""
        return self._slots.checksum(slot)

    @property
    def _resident(self) -> Resident:
        return Resident(self._top, self._layers, self._slots.arrays)

    def _move_pages(self, dispatch: PrefillDispatch | DecodeDispatch) -> None:
        """Stores first: a page that is stored may be loaded into, or copied into, by the same dispatch."""
        if dispatch.stores:
            self._host.store(self._k, self._v, dispatch.stores)
        if dispatch.loads:
            self._k, self._v = self._host.load(self._k, self._v, dispatch.loads)
        self.copy_pages(dispatch.copies)

    def _run_decode(self, lanes: Lanes) -> Tokens:
        self._used.add(("decode", len(lanes.id_W), len(lanes.slot_R)))
        settings = {"config": self._model, "max_steps": self._num_steps, "is_joint": self.regroups, "kernel": self._kernel}
        tokens, self._k, self._v = programs.decode(self._resident, self._k, self._v, lanes, **settings)
        return tokens

    def _run_prefill(self, rows: Rows, *, is_scored: bool) -> Scores | None:
        self._used.add(("prefill", len(rows.id_RC), int(is_scored)))
        settings = {"config": self._model, "is_scored": is_scored, "kernel": self._kernel}
        scores, self._k, self._v = programs.prefill(self._resident, self._k, self._v, rows, **settings)
        return scores

    def _empty_lanes(self, width: int, lanes_per_row: int) -> Lanes:
        """Padding only. lanes_per_row: of one adapter slot each."""
        int_W = np.zeros(width, np.int32)
        ones_W = np.ones(width, np.float32)
        choice = Choice(np.zeros((width, 2), np.uint32), int_W.copy(), ones_W, int_W.copy(), ones_W.copy(), int_W.copy())
        stop_WX, table_WP = np.full((width, MAX_STOP_IDS), -1, np.int32), np.zeros((width, self._num_table_pages), np.int32)
        slot_R, num_shared_U = np.zeros(width // lanes_per_row, np.int32), np.zeros(width // LANES_PER_TILE, np.int32)
        return Lanes(int_W, int_W.copy(), int_W.copy(), choice, stop_WX, table_WP, slot_R, num_shared_U)

    def _empty_rows(self, num_rows: int) -> Rows:
        int_R, id_RC = np.zeros(num_rows, np.int32), np.zeros((num_rows, CHUNK), np.int32)
        return Rows(id_RC, int_R, int_R.copy(), np.zeros((num_rows, self._num_table_pages), np.int32), int_R.copy(), id_RC.copy(), int_R.copy())


def _smallest(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)


# Packing


def _pack_lanes(dispatch: DecodeDispatch, lanes: Lanes) -> Lanes:
    """Fill empty lanes in place: a tile's sequences lie side by side."""
    lane_of = [index * dispatch.lanes_per_tile + place for index, tile in enumerate(dispatch.tiles) for place in range(len(tile.sequences))]
    sequences = [sequence for tile in dispatch.tiles for sequence in tile.sequences]
    params = [sequence.request.params for sequence in sequences]
    lanes.id_W[lane_of] = [sequence.input_id for sequence in sequences]
    lanes.position_W[lane_of] = [sequence.position for sequence in sequences]
    lanes.remaining_W[lane_of] = [sequence.num_remaining for sequence in sequences]
    lanes.choice.seed_W2[lane_of] = [divmod(each.seed, 2**32) for each in params]
    lanes.choice.sample_index_W[lane_of] = [each.sample_index for each in params]
    lanes.choice.temperature_W[lane_of] = [each.temperature for each in params]
    lanes.choice.top_k_W[lane_of] = [each.top_k for each in params]
    lanes.choice.top_p_W[lane_of] = [each.top_p for each in params]
    lanes.choice.num_top_W[lane_of] = [sequence.request.num_top for sequence in sequences]
    _fill(lanes.stop_WX, lane_of, [sequence.stop_ids for sequence in sequences])
    _fill(lanes.table_WP, lane_of, [sequence.table for sequence in sequences])
    lanes_per_row = len(lanes.id_W) // len(lanes.slot_R)
    slot_of_tile = [tile.slot for tile in dispatch.tiles]
    slot_R = np.repeat(np.asarray(slot_of_tile, np.int32), dispatch.lanes_per_tile // lanes_per_row)
    lanes.slot_R[: len(slot_R)] = slot_R
    if lanes_per_row < dispatch.lanes_per_tile:  # padding within a tile uses no adapter
        lanes.slot_R[lanes.remaining_W == 0] = 0
    if dispatch.lanes_per_tile == LANES_PER_TILE:
        lanes.num_shared_U[: len(dispatch.tiles)] = [tile.num_shared for tile in dispatch.tiles]
    return lanes


def _pack_rows(dispatch: PrefillDispatch, rows: Rows) -> Rows:
    """Fill empty rows in place, from the first on."""
    numbers = range(len(dispatch.rows))
    _fill(rows.id_RC, numbers, [row.ids for row in dispatch.rows])
    _fill(rows.table_RP, numbers, [row.table for row in dispatch.rows])
    _fill(rows.target_RC, numbers, [row.targets for row in dispatch.rows])
    for column, values in (
        (rows.start_R, [row.start for row in dispatch.rows]),
        (rows.length_R, [len(row.ids) for row in dispatch.rows]),
        (rows.slot_R, [row.slot for row in dispatch.rows]),
        (rows.num_top_R, [row.num_top for row in dispatch.rows]),
    ):
        column[: len(values)] = values
    return rows


def _fill(out_RX: IntArray, numbers: Sequence[int], values: Sequence[Sequence[int]]) -> None:
    """Values of different lengths into the first columns of the numbered rows, in one assignment."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    flat = np.fromiter(chain.from_iterable(values), np.int32, int(lengths.sum()))
    row = np.repeat(np.asarray(numbers, np.int64), lengths)
    column = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out_RX[row, column] = flat


# Taking apart


def _sampled(dispatch: DecodeDispatch, tokens: Sequence[npt.NDArray[Any]]) -> list[list[Sampled]]:
    """tokens: the leaves of `Tokens`, on the host; the first two where nobody wants most likely ids."""
    id_SW = tokens[0]
    count_W = (id_SW >= 0).sum(0).tolist()
    id_WS, logprobs_WS = (leaf.T.tolist() for leaf in tokens[:2])

    def lane(w: int, num_top: int) -> Sampled:
        count = count_W[w]
        top = [_top_ids(tokens[2][step, w], tokens[3][step, w], num_top) for step in range(count)] if num_top else ()
        return Sampled(id_WS[w][:count], logprobs_WS[w][:count], top)

    firsts = range(0, len(dispatch.tiles) * dispatch.lanes_per_tile, dispatch.lanes_per_tile)
    return [
        [lane(w, sequence.request.num_top) for w, sequence in enumerate(tile.sequences, first)]
        for first, tile in zip(firsts, dispatch.tiles, strict=True)
    ]


def _scored(dispatch: PrefillDispatch, scores: Sequence[npt.NDArray[Any]]) -> list[Scored]:
    """scores: the leaves of `Scores`, on the host."""
    logprobs_RC, top_id_RCT, top_logprobs_RCT = scores
    found = []
    for r, row in enumerate(dispatch.rows):
        if row.targets:
            count = len(row.targets)
            top = [_top_ids(top_id_RCT[r, c], top_logprobs_RCT[r, c], row.num_top) for c in range(count)] if row.num_top else ()
            found.append(Scored(logprobs_RC[r, :count].tolist(), top))
    return found


def _top_ids(id_T: npt.NDArray[Any], logprobs_T: npt.NDArray[Any], num_top: int) -> TopIds:
    return tuple(zip(id_T[:num_top].tolist(), logprobs_T[:num_top].tolist(), strict=True))
