"""All arrays of the sampler but the adapters' (`sampler.adapters`), and the programs that run on them: prefill, decode, copy of pages.

A program is compiled once per shape of a closed set (`Shapes`). K/V pools and adapter slots are donated through every program, so that they are
updated in place. Layers are a Python loop over lists: a scan would copy each layer's weights, which costs more than the layer on CPU.

    R row: lane tile (decode) or chunk (prefill)   C position within a row: 8 lanes, or 32 positions   W lane, or flat position   T tile
    P page of a table   Y, Z the vocabulary as rows and columns
    D model   N query heads   K kv heads   H head size   V vocabulary   A adapter slot   S step of a dispatch   X stop id

What lies in a page is always finite in V: a masked key has weight 0, and 0 * NaN would carry one run's broken numbers into another run that owns the
page later or reads it as padding; the position that made them gets NaN as its output, so that they are seen. K needs no such care, since masked
scores are replaced before the softmax.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from noria.config import SamplerConfig
from noria.model.config import ModelConfig
from noria.model.lora import HostAdapter
from noria.model.placement import BaseParams
from noria.model.transformer import block, embed, head_product, rms_norm, rotary_angles
from noria.sampler.adapters import AdapterSlots, Slots, add_head, layer_deltas
from noria.sampler.paged_attention import BLOCK_PAGES, attend_rows
from noria.sampler.pages import PAGE
from noria.sampler.sequence import CHUNK, LANES_PER_TILE, MAX_STOP_IDS, DecodeDispatch, PageCopy, PrefillDispatch, Sampled

COPY_WIDTH = 16
"""Page copies of one program run."""

_COLUMNS = 256
"""Columns of the vocabulary as a matrix: reductions over its rows use vector instructions, over a flat vocabulary they do not."""

Pool: TypeAlias = tuple[jax.Array, ...]
"""Per layer [pages, PAGE, K, H], float32."""


Leaf: TypeAlias = Any
"""An array of a dispatch's input: NumPy where it is packed, jax.Array inside a program."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The closed set of shapes: one program each. lanes: decode widths, multiples of 8. rows: prefill rows, even. Both in ascending order.
    tops: top modules (`lora.TOP_MODULES`) that the adapter slots have room for.

    A lane's and a row's bits do not depend on their place in a dispatch nor on its other lanes and rows; a lane's do depend on the width, since XLA
    orders the sums of a matrix product by the product's shape. So whatever holds a deterministic run's requests has one width and one number of rows.
    """

    lanes: tuple[int, ...]
    rows: tuple[int, ...]
    tops: tuple[str, ...] = ()

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


class Lanes(NamedTuple):
    """One decode dispatch's input. remaining_W: tokens a lane may still sample, 0 for padding. seed_W2: high and low 32 bits, uint32."""

    id_W: Leaf
    position_W: Leaf
    remaining_W: Leaf
    seed_W2: Leaf
    sample_index_W: Leaf
    temperature_W: Leaf
    stop_WX: Leaf
    table_WP: Leaf
    slot_T: Leaf


class Rows(NamedTuple):
    """One prefill dispatch's input. length_R: ids of each row that count."""

    id_RC: Leaf
    start_R: Leaf
    length_R: Leaf
    table_RP: Leaf
    slot_R: Leaf


class _Resident(NamedTuple):
    """Arrays that every forward pass reads: weights outside the layers, weights per layer, adapter slots."""

    params: Mapping[str, jax.Array]
    layers: tuple[dict[str, jax.Array], ...]
    slots: Slots


@final
class Runner:
    """Owner of all device arrays of the sampler. Touched by the device thread only; every method but `warm_up` runs one program per call."""

    def __init__(
        self, base: BaseParams, model: ModelConfig, config: SamplerConfig, *, rank_classes: tuple[int, ...], shapes: Shapes | None = None
    ) -> None:
        self.shapes = shapes or Shapes.of(config)
        self._model = model
        self._num_steps = config.steps_per_dispatch
        self._num_table_pages = -(-config.max_context // (PAGE * BLOCK_PAGES)) * BLOCK_PAGES
        pool_shape = (config.num_pages, PAGE, model.num_kv_heads, model.head_dim)
        self._k: Pool = tuple(jnp.zeros(pool_shape, jnp.float32) for _ in range(model.num_layers))
        self._v: Pool = tuple(jnp.zeros(pool_shape, jnp.float32) for _ in range(model.num_layers))
        self._top = {name: array for name, array in base.stacked.items() if name != "layers"}
        self._layers = base.layers
        self._slots = AdapterSlots(model, config.num_slots, rank_classes, self.shapes.tops)
        self._used: set[tuple[str, int]] = set()

    @property
    def num_programs(self) -> int:
        """Programs used so far, each compiled at its first use (once per process for equal models and sizes)."""
        return len(self._used) + self._slots.num_programs

    def warm_up(self) -> None:
        """Compile every program of the closed set. Takes seconds per program for deep models; without it, the first use compiles."""
        for lanes in self.shapes.lanes:
            self._run_decode(_empty_lanes(lanes, self._num_table_pages))
        for rows in self.shapes.rows:
            self._run_prefill(_empty_rows(rows, self._num_table_pages))
        self.copy_pages([PageCopy(0, 0)])
        self._slots.warm_up()

    def prefill(self, dispatch: PrefillDispatch) -> None:
        """Write the K/V of all rows. Returns when the device is done."""
        self.copy_pages(dispatch.copies)
        num_rows = self.shapes.fixed[1] if dispatch.is_fixed else _smallest(self.shapes.rows, len(dispatch.rows))
        self._run_prefill(_pack_rows(dispatch, _empty_rows(num_rows, self._num_table_pages)))
        jax.block_until_ready(self._k[-1])

    def decode(self, dispatch: DecodeDispatch) -> list[list[Sampled]]:
        """Sample up to `steps_per_dispatch` tokens for every lane: per tile and lane, what it sampled."""
        self.copy_pages(dispatch.copies)
        width = self.shapes.fixed[0] if dispatch.is_fixed else _smallest(self.shapes.lanes, len(dispatch.tiles) * LANES_PER_TILE)
        lanes = _pack_lanes(dispatch, _empty_lanes(width, self._num_table_pages))
        id_SW, behavior_logprobs_SW = (np.asarray(x) for x in self._run_decode(lanes))
        count_W = (id_SW >= 0).sum(0)
        sampled = []
        for index, tile in enumerate(dispatch.tiles):
            first = index * LANES_PER_TILE
            columns = range(first, first + len(tile.sequences))
            sampled.append([Sampled(id_SW[: count_W[w], w].tolist(), behavior_logprobs_SW[: count_W[w], w].tolist()) for w in columns])
        return sampled

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy whole pages of all layers. No page is both a source and a target."""
        pending = list(copies)
        for start in range(0, len(pending), COPY_WIDTH):
            page_2X = np.zeros((2, COPY_WIDTH), np.int32)
            part = pending[start : start + COPY_WIDTH]
            page_2X[:, : len(part)] = np.asarray(part, np.int32).T
            self._used.add(("copy", COPY_WIDTH))
            self._k, self._v = _copy_pages(self._k, self._v, page_2X)

    def write_slot(self, slot: int, adapter: HostAdapter, scale: float) -> None:
        """Put an adapter into a slot: see `AdapterSlots.write`."""
        self._slots.write(slot, adapter, scale)

    def checksum(self, slot: int) -> int:
        """The integer checksum of the slot's bytes on the device, equal to `lora.checksum` of what was written."""
        return self._slots.checksum(slot)

    @property
    def _resident(self) -> _Resident:
        return _Resident(self._top, self._layers, self._slots.arrays)

    def _run_decode(self, lanes: Lanes) -> tuple[jax.Array, jax.Array]:
        self._used.add(("decode", lanes.table_WP.shape[0]))
        id_SW, behavior_logprobs_SW, self._k, self._v = _decode(
            self._resident, self._k, self._v, lanes, config=self._model, max_steps=self._num_steps
        )
        return id_SW, behavior_logprobs_SW

    def _run_prefill(self, rows: Rows) -> None:
        self._used.add(("prefill", rows.table_RP.shape[0]))
        self._k, self._v = _prefill(self._resident, self._k, self._v, rows, config=self._model)


# Programs


@partial(jax.jit, static_argnames=("config", "max_steps"), donate_argnums=(1, 2))
def _decode(resident: _Resident, k: Pool, v: Pool, lanes: Lanes, *, config: ModelConfig, max_steps: int) -> tuple[jax.Array, jax.Array, Pool, Pool]:
    """Sample up to max_steps tokens per lane, stopping when every lane has finished.

    Returns ids [S, W], -1 where a lane sampled nothing; behavior_logprobs [S, W] (natural log, after temperature, full vocabulary); and the pools.
    """
    width = lanes.table_WP.shape[0]
    lane_W = jnp.arange(width)

    def is_running(carry: tuple[Any, ...]) -> jax.Array:
        step, _, _, remaining_W = carry[:4]
        return (step < max_steps) & jnp.any(remaining_W > 0)

    def step_once(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, id_W, position_W, remaining_W, out_id_SW, out_logprobs_SW, k, v = carry
        is_active_W = remaining_W > 0
        page_W = jnp.where(is_active_W, lanes.table_WP[lane_W, position_W // PAGE], 0)
        hidden_RCD, k, v = _forward(
            resident,
            k,
            v,
            _Positions(id_W, position_W, page_W, lanes.table_WP),
            lanes.slot_T,
            config=config,
            queries_per_table=1,
            rows_per_group=LANES_PER_TILE,
        )
        logits_WV = _unembed(resident, hidden_RCD, lanes.slot_T, config)
        sampled_W, logprobs_W = _sample(logits_WV, lanes, position_W + 1)
        is_last_W = jnp.any(sampled_W[:, None] == lanes.stop_WX, axis=1)
        out_id_SW = out_id_SW.at[step].set(jnp.where(is_active_W, sampled_W, -1))
        out_logprobs_SW = out_logprobs_SW.at[step].set(logprobs_W)
        id_W = jnp.where(is_active_W, sampled_W, id_W)
        position_W = position_W + is_active_W
        remaining_W = jnp.where(is_last_W, 0, remaining_W - is_active_W)
        return step + 1, id_W, position_W, remaining_W, out_id_SW, out_logprobs_SW, k, v

    outputs = jnp.full((max_steps, width), -1, jnp.int32), jnp.zeros((max_steps, width), jnp.float32)
    start = (jnp.int32(0), lanes.id_W, lanes.position_W, lanes.remaining_W, *outputs, k, v)
    carry = jax.lax.while_loop(is_running, step_once, start)
    return carry[4], carry[5], carry[6], carry[7]


@partial(jax.jit, static_argnames=("config",), donate_argnums=(1, 2))
def _prefill(resident: _Resident, k: Pool, v: Pool, rows: Rows, *, config: ModelConfig) -> tuple[Pool, Pool]:
    """Write the K/V of every row's positions."""
    num_rows = rows.table_RP.shape[0]
    offset_C = jnp.arange(CHUNK)
    position_RC = rows.start_R[:, None] + offset_C
    is_real_RC = offset_C < rows.length_R[:, None]
    page_RC = jnp.where(is_real_RC, rows.table_RP[jnp.arange(num_rows)[:, None], position_RC // PAGE], 0)
    positions = _Positions(rows.id_RC.reshape(-1), position_RC.reshape(-1), page_RC.reshape(-1), rows.table_RP)
    _, k, v = _forward(resident, k, v, positions, rows.slot_R, config=config, queries_per_table=CHUNK, rows_per_group=2)
    return k, v


class _Positions(NamedTuple):
    """A flat axis W of positions to run: their ids, positions and pages to write to; and the page tables, one for `queries_per_table` positions."""

    id_W: jax.Array
    position_W: jax.Array
    page_W: jax.Array
    table: jax.Array


def _forward(
    resident: _Resident, k: Pool, v: Pool, at: _Positions, slot_R: jax.Array, *, config: ModelConfig, queries_per_table: int, rows_per_group: int
) -> tuple[jax.Array, Pool, Pool]:
    """All layers for W positions in R rows of one adapter slot each: hidden states [R, C, D] and the pools with the positions' K/V written."""
    num_rows = slot_R.shape[0]
    position_RC = at.position_W.reshape(num_rows, -1)
    offset_W = at.position_W % PAGE
    position_query = at.position_W.reshape(-1, queries_per_table)
    angles = rotary_angles(config, position_RC)
    x_RCD = embed(resident.params, at.id_W).reshape(num_rows, -1, config.hidden_size)
    new_k, new_v = list(k), list(v)
    for layer, weights in enumerate(resident.layers):

        def attention(q_RCNH: jax.Array, k_RCKH: jax.Array, v_RCKH: jax.Array, layer: int = layer) -> jax.Array:
            k_WKH, v_WKH = (x.reshape(-1, *x.shape[2:]) for x in (k_RCKH, v_RCKH))
            new_k[layer] = new_k[layer].at[at.page_W, offset_W].set(k_WKH)
            is_finite_WKH = jnp.isfinite(v_WKH)
            new_v[layer] = new_v[layer].at[at.page_W, offset_W].set(jnp.where(is_finite_WKH, v_WKH, 0.0))
            q = q_RCNH.reshape(-1, queries_per_table, *q_RCNH.shape[2:])
            out = attend_rows(q, new_k[layer], new_v[layer], at.table, position_query, rows_per_group=rows_per_group)
            broken_W = jnp.where(is_finite_WKH.all((1, 2)), 0.0, jnp.nan)
            return out.reshape(q_RCNH.shape) + broken_W.reshape(*q_RCNH.shape[:2], 1, 1)

        deltas = layer_deltas(resident.slots, layer, slot_R)
        x_RCD = block(weights, deltas, x_RCD, angles=angles, attention=attention, config=config)
    return x_RCD, tuple(new_k), tuple(new_v)


def _unembed(resident: _Resident, hidden_RCD: jax.Array, slot_R: jax.Array, config: ModelConfig) -> jax.Array:
    """Final norm and head, with the rows' own deltas where room for them is compiled in: logits [W, V]."""
    normed_RCD = rms_norm(hidden_RCD, resident.params["final_norm"], config.rms_norm_eps)
    logits_WV = head_product(resident.params, normed_RCD.reshape(-1, config.hidden_size))
    return add_head(resident.slots, slot_R, normed_RCD, logits_WV)


def _sample(logits_WV: jax.Array, lanes: Lanes, position_W: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One id per lane, drawn from softmax(logits / temperature), temperature 0: the most likely; and its log-probability.

    The key of a token is fold_in(fold_in(seed, sample index), position of the sampled token): it depends on nothing else in the batch. The draw
    inverts the cumulative distribution in two stages, over the columns of the vocabulary laid out as a matrix, then within a column: two random
    numbers instead of one per id (Gumbel-max), which cost as much as all matmuls of a decode step on CPU.
    """
    vocab_size = logits_WV.shape[1]
    is_random_W = lanes.temperature_W > 0
    scaled_WV = logits_WV / jnp.where(is_random_W, lanes.temperature_W, 1.0)[:, None]
    padded_WV = jnp.pad(scaled_WV, ((0, 0), (0, -vocab_size % _COLUMNS)), constant_values=-jnp.inf)
    scaled_WYZ = padded_WV.reshape(padded_WV.shape[0], -1, _COLUMNS)
    peak_W = scaled_WYZ.max(1).max(1)
    weight_WYZ = jnp.exp(scaled_WYZ - peak_W[:, None, None])
    weight_WZ = weight_WYZ.sum(1)
    uniform_W2 = jax.vmap(_uniform_pair)(lanes.seed_W2, lanes.sample_index_W, position_W)
    z_W = _draw(weight_WZ, uniform_W2[:, 0])
    y_W = _draw(jnp.take_along_axis(weight_WYZ, z_W[:, None, None], axis=2)[:, :, 0], uniform_W2[:, 1])
    id_YZ = jnp.arange(padded_WV.shape[1], dtype=jnp.int32).reshape(-1, _COLUMNS)
    best_W = jnp.where(scaled_WYZ == peak_W[:, None, None], id_YZ, vocab_size - 1).min(1).min(1)
    sampled_W = jnp.where(is_random_W, y_W * _COLUMNS + z_W, best_W)
    chosen_W = jnp.take_along_axis(scaled_WV, sampled_W[:, None], axis=1)[:, 0]
    return sampled_W, chosen_W - peak_W - jnp.log(weight_WZ.sum(1))


def _uniform_pair(seed_2: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
    """Two uniform numbers in [0, 1)."""
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, sample_index), position), (2,), jnp.float32)


def _draw(weight_WX: jax.Array, uniform_W: jax.Array) -> jax.Array:
    """An index per row with probability proportional to its weight; never one of weight 0, whatever the rounding of the cumulative sums."""
    size = weight_WX.shape[1]
    index_X = jnp.arange(size, dtype=jnp.int32)
    cumulative_WX = jnp.cumsum(weight_WX, axis=1)
    is_possible_WX = weight_WX > 0
    is_reached_WX = is_possible_WX & (cumulative_WX > uniform_W[:, None] * cumulative_WX[:, -1:])
    first_W = jnp.where(is_reached_WX, index_X, size).min(1)
    last_W = jnp.where(is_possible_WX, index_X, 0).max(1)
    return jnp.minimum(first_W, last_W)


@partial(jax.jit, donate_argnums=(0, 1))
def _copy_pages(k: Pool, v: Pool, page_2X: jax.Array) -> tuple[Pool, Pool]:
    """Pages page_2X[0] to pages page_2X[1], in every layer; padding copies the trash page onto itself."""
    source, target = page_2X[0], page_2X[1]
    return tuple(x.at[target].set(x[source]) for x in k), tuple(x.at[target].set(x[source]) for x in v)


# Packing


def _smallest(sizes: tuple[int, ...], needed: int) -> int:
    return next(size for size in sizes if size >= needed)


def _empty_lanes(width: int, pages: int) -> Lanes:
    int_W = partial(np.zeros, width, np.int32)
    return Lanes(
        id_W=int_W(),
        position_W=int_W(),
        remaining_W=int_W(),
        seed_W2=np.zeros((width, 2), np.uint32),
        sample_index_W=int_W(),
        temperature_W=np.ones(width, np.float32),
        stop_WX=np.full((width, MAX_STOP_IDS), -1, np.int32),
        table_WP=np.zeros((width, pages), np.int32),
        slot_T=np.zeros(width // LANES_PER_TILE, np.int32),
    )


def _pack_lanes(dispatch: DecodeDispatch, lanes: Lanes) -> Lanes:
    for index, tile in enumerate(dispatch.tiles):
        lanes.slot_T[index] = tile.slot
        for lane, sequence in enumerate(tile.sequences, index * LANES_PER_TILE):
            params = sequence.request.params
            lanes.id_W[lane] = sequence.input_id
            lanes.position_W[lane] = sequence.position
            lanes.remaining_W[lane] = sequence.num_remaining
            lanes.seed_W2[lane] = divmod(params.seed, 2**32)
            lanes.sample_index_W[lane] = params.sample_index
            lanes.temperature_W[lane] = params.temperature
            lanes.stop_WX[lane, : len(sequence.stop_ids)] = sequence.stop_ids
            lanes.table_WP[lane, : len(sequence.table)] = sequence.table
    return lanes


def _empty_rows(num_rows: int, pages: int) -> Rows:
    int_R = partial(np.zeros, num_rows, np.int32)
    return Rows(np.zeros((num_rows, CHUNK), np.int32), int_R(), int_R(), np.zeros((num_rows, pages), np.int32), int_R())


def _pack_rows(dispatch: PrefillDispatch, rows: Rows) -> Rows:
    for index, row in enumerate(dispatch.rows):
        rows.id_RC[index, : len(row.ids)] = row.ids
        rows.start_R[index] = row.start
        rows.length_R[index] = len(row.ids)
        rows.table_RP[index, : len(row.table)] = row.table
        rows.slot_R[index] = row.slot
    return rows
