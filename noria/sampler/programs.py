"""The sampler's programs: decode, prefill (with or without the log-probabilities of its ids), and the copy of pages.

A program is compiled once per shape of a closed set (`runner.Shapes`). K/V pools are donated through every program, and so updated in place.
Layers are a Python loop over lists: a scan would copy each layer's weights, which costs more than the layer on CPU. There is one decode program per
width: what some lanes ask for beyond a plain draw lies in branches that a dispatch without such lanes skips (`sampler.draw`).

    R row: lanes of one adapter slot (decode), or chunk (prefill)   C position within a row   W lane, or flat position   U group of rows of attention
    P page of a table   D model   N query heads   K kv heads   H head size   V vocabulary   S step of a dispatch   X stop id   T most likely ids

What lies in a page is always finite in V: a masked key has weight 0, and 0 * NaN would carry one run's broken numbers into another run that owns the
page later or reads it as padding; the position that made them gets NaN as its output, so that they are seen. K needs no such care, since masked
scores are replaced before the softmax; but a kernel may mask by adding, and so there K is finite too.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from noria.model.config import ModelConfig
from noria.model.transformer import block, embed, head_product, rms_norm, rotary_angles
from noria.sampler.adapters import RowPlan, Slots, add_head, layer_deltas, plan_rows
from noria.sampler.draw import Choice, draw, most_likely, tabulate
from noria.sampler.page_kernels import Kernel, write_positions
from noria.sampler.paged_attention import attend_rows
from noria.sampler.pages import PAGE
from noria.sampler.sequence import CHUNK, LANES_PER_TILE
from noria.types import MAX_TOP

ROWS_PER_GROUP = 2
"""Prefill rows that attention reads blocks for at once."""

Pool: TypeAlias = tuple[jax.Array, ...]
"""Per layer [pages, *page_kernels.page_shape], in the dtype of the base."""

Leaf: TypeAlias = Any
"""An array of a dispatch's input: NumPy where it is packed, jax.Array inside a program."""


class Lanes(NamedTuple):
    """One decode dispatch's input. remaining_W: tokens a lane may still sample, 0 for padding. slot_R: R divides W. num_shared_U: of each
    LANES_PER_TILE lanes, the pages from position 0 on that they have in common, whole blocks."""

    id_W: Leaf
    position_W: Leaf
    remaining_W: Leaf
    choice: Choice
    stop_WX: Leaf
    table_WP: Leaf
    slot_R: Leaf
    num_shared_U: Leaf


class Rows(NamedTuple):
    """One prefill dispatch's input. length_R: ids of each row that count. target_RC: the ids that follow, 0 where they are not wanted.
    num_top_R: most likely ids wanted."""

    id_RC: Leaf
    start_R: Leaf
    length_R: Leaf
    table_RP: Leaf
    slot_R: Leaf
    target_RC: Leaf
    num_top_R: Leaf


class Resident(NamedTuple):
    """Arrays that every forward pass reads: weights outside the layers, weights per layer, adapter slots."""

    params: Mapping[str, jax.Array]
    layers: tuple[dict[str, jax.Array], ...]
    slots: Slots


class Tokens(NamedTuple):
    """What a decode dispatch sampled, step by step. id_SW: -1 where a lane sampled nothing; logprobs_SW and the most likely ids: see `draw.Drawn`."""

    id_SW: jax.Array
    logprobs_SW: jax.Array
    top_id_SWT: jax.Array
    top_logprobs_SWT: jax.Array


class Scores(NamedTuple):
    """What each position's target and most likely ids came to, at temperature 1."""

    logprobs_RC: jax.Array
    top_id_RCT: jax.Array
    top_logprobs_RCT: jax.Array


class _Positions(NamedTuple):
    """A flat axis W of positions to run: their ids, positions and pages to write to; and the page tables, one for `queries_per_table` positions."""

    id_W: jax.Array
    position_W: jax.Array
    page_W: jax.Array
    table: jax.Array
    num_shared_U: jax.Array | None


class _Shape(NamedTuple):
    """Static: positions that use one page table, tables that attention reads blocks for at once, and whether it reads for all where it can."""

    queries_per_table: int
    rows_per_group: int
    kernel: Kernel
    is_joint: bool = False


@partial(jax.jit, static_argnames=("config", "max_steps", "is_joint", "kernel"), donate_argnums=(1, 2))
def decode(
    resident: Resident, k: Pool, v: Pool, lanes: Lanes, *, config: ModelConfig, max_steps: int, is_joint: bool, kernel: Kernel
) -> tuple[Tokens, Pool, Pool]:
    """Sample up to max_steps tokens per lane, stopping when every lane has finished. is_joint, kernel: see `attend_rows`."""
    width = lanes.table_WP.shape[0]
    lane_W = jnp.arange(width)
    plan = plan_rows(resident.slots, lanes.slot_R)
    shape = _Shape(queries_per_table=1, rows_per_group=LANES_PER_TILE, kernel=kernel, is_joint=is_joint)

    def is_running(carry: tuple[Any, ...]) -> jax.Array:
        step, _, _, remaining_W = carry[:4]
        is_left: jax.Array = (step < max_steps) & jnp.any(remaining_W > 0)
        return is_left

    def step_once(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, id_W, position_W, remaining_W, tokens, k, v = carry
        is_active_W = remaining_W > 0
        page_W = jnp.where(is_active_W, lanes.table_WP[lane_W, position_W // PAGE], 0)
        at = _Positions(id_W, position_W, page_W, lanes.table_WP, lanes.num_shared_U)
        hidden_RCD, k, v = _forward(resident, k, v, at, plan, config=config, shape=shape)
        drawn = draw(_unembed(resident, hidden_RCD, plan, config), lanes.choice, position_W + 1)
        sampled_W = drawn.id_W
        is_last_W = jnp.any(sampled_W[:, None] == lanes.stop_WX, axis=1)
        found = Tokens(jnp.where(is_active_W, sampled_W, -1), *drawn[1:])
        tokens = jax.tree.map(lambda whole, one: whole.at[step].set(one), tokens, found)
        id_W = jnp.where(is_active_W, sampled_W, id_W)
        position_W = position_W + is_active_W
        remaining_W = jnp.where(is_last_W, 0, remaining_W - is_active_W)
        return step + 1, id_W, position_W, remaining_W, tokens, k, v

    tops = max_steps, width, MAX_TOP
    tokens = Tokens(jnp.full(tops[:2], -1, jnp.int32), jnp.zeros(tops[:2]), jnp.zeros(tops, jnp.int32), jnp.zeros(tops))
    carry = jax.lax.while_loop(is_running, step_once, (jnp.int32(0), lanes.id_W, lanes.position_W, lanes.remaining_W, tokens, k, v))
    return carry[4], carry[5], carry[6]


@partial(jax.jit, static_argnames=("config", "is_scored", "kernel"), donate_argnums=(1, 2))
def prefill(
    resident: Resident, k: Pool, v: Pool, rows: Rows, *, config: ModelConfig, is_scored: bool, kernel: Kernel
) -> tuple[Scores | None, Pool, Pool]:
    """Write the K/V of every row's positions; is_scored: also find the log-probabilities of its targets, which takes the last layer and the head."""
    num_rows = rows.table_RP.shape[0]
    offset_C = jnp.arange(CHUNK)
    position_RC = rows.start_R[:, None] + offset_C
    is_real_RC = offset_C < rows.length_R[:, None]
    page_RC = jnp.where(is_real_RC, rows.table_RP[jnp.arange(num_rows)[:, None], position_RC // PAGE], 0)
    at = _Positions(rows.id_RC.reshape(-1), position_RC.reshape(-1), page_RC.reshape(-1), rows.table_RP, num_shared_U=None)
    plan = plan_rows(resident.slots, rows.slot_R)
    hidden_RCD, k, v = _forward(resident, k, v, at, plan, config=config, shape=_Shape(CHUNK, ROWS_PER_GROUP, kernel))
    return (_score(resident, hidden_RCD, rows, config) if is_scored else None), k, v


@partial(jax.jit, donate_argnums=(0, 1))
def copy_pages(k: Pool, v: Pool, page_2X: jax.Array) -> tuple[Pool, Pool]:
    """Pages page_2X[0] to pages page_2X[1], in every layer; padding copies the trash page onto itself."""
    source, target = page_2X[0], page_2X[1]
    return tuple(x.at[target].set(x[source]) for x in k), tuple(x.at[target].set(x[source]) for x in v)


def _forward(
    resident: Resident, k: Pool, v: Pool, at: _Positions, plan: RowPlan, *, config: ModelConfig, shape: _Shape
) -> tuple[jax.Array, Pool, Pool]:
    """All layers for W positions in R rows of one adapter slot each: hidden states [R, C, D] and the pools with the positions' K/V written."""
    num_rows = plan.slot_R.shape[0]
    position_RC = at.position_W.reshape(num_rows, -1)
    offset_W = at.position_W % PAGE
    position_query = at.position_W.reshape(-1, shape.queries_per_table)
    angles = rotary_angles(config, position_RC)
    x_RCD = embed(resident.params, at.id_W).reshape(num_rows, -1, config.hidden_size)
    new_k, new_v = list(k), list(v)
    for layer, weights in enumerate(resident.layers):

        def attention(q_RCNH: jax.Array, k_RCKH: jax.Array, v_RCKH: jax.Array, layer: int = layer) -> jax.Array:
            k_WKH, v_WKH = (x.reshape(-1, *x.shape[2:]) for x in (k_RCKH, v_RCKH))
            is_finite_WKH = jnp.isfinite(v_WKH)
            if shape.kernel != Kernel.LOOPS:
                is_finite_WKH &= jnp.isfinite(k_WKH)
                k_WKH = jnp.where(is_finite_WKH, k_WKH, 0.0)
            new_k[layer] = write_positions(new_k[layer], at.page_W, offset_W, k_WKH, shape.kernel)
            new_v[layer] = write_positions(new_v[layer], at.page_W, offset_W, jnp.where(is_finite_WKH, v_WKH, 0.0), shape.kernel)
            q = q_RCNH.reshape(-1, shape.queries_per_table, *q_RCNH.shape[2:])
            keys = new_k[layer], new_v[layer], at.table
            read = partial(attend_rows, rows_per_group=shape.rows_per_group, is_joint=shape.is_joint, kernel=shape.kernel)
            out = read(q, *keys, position_query, num_shared_U=at.num_shared_U)
            broken_W = jnp.where(is_finite_WKH.all((1, 2)), 0.0, jnp.nan)
            return out.reshape(q_RCNH.shape) + broken_W.reshape(*q_RCNH.shape[:2], 1, 1)

        deltas = layer_deltas(resident.slots, layer, plan)
        x_RCD = block(weights, deltas, x_RCD, angles=angles, attention=attention, config=config)
    return x_RCD, tuple(new_k), tuple(new_v)


def _unembed(resident: Resident, hidden_RCD: jax.Array, plan: RowPlan, config: ModelConfig) -> jax.Array:
    """Final norm and head, with the rows' own deltas where room for them is compiled in: logits [W, V]."""
    normed_RCD = rms_norm(hidden_RCD, resident.params["final_norm"], config.rms_norm_eps)
    logits_WV = head_product(resident.params, normed_RCD.reshape(-1, config.hidden_size))
    return add_head(resident.slots, plan, normed_RCD, logits_WV)


def _score(resident: Resident, hidden_RCD: jax.Array, rows: Rows, config: ModelConfig) -> Scores:
    """Row after row, so that the logits of one row are all that there ever are."""
    num_rows, length, _ = hidden_RCD.shape
    tops = num_rows, length, MAX_TOP
    empty = Scores(jnp.zeros(tops[:2]), jnp.zeros(tops, jnp.int32), jnp.zeros(tops))

    def score_row(row: jax.Array, scores: Scores) -> Scores:
        hidden_1CD, slot_1 = (jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (hidden_RCD, rows.slot_R))
        table = tabulate(_unembed(resident, hidden_1CD, plan_rows(resident.slots, slot_1), config))
        found = Scores(table.logprobs(rows.target_RC[row]), *most_likely(table, jnp.full(length, rows.num_top_R[row])))
        return Scores(*(whole.at[row].set(one) for whole, one in zip(scores, found, strict=True)))

    num_real = (rows.length_R > 0).sum()  # rows in use come first
    scores: Scores = jax.lax.fori_loop(0, num_real, score_row, empty)
    return scores
