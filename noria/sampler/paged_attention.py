"""Attention over keys that lie in pages, without ever gathering a whole context: the sampler's sibling of `model.attention.attend`.

    a group's shared blocks: read once, from its first row ──▶ each row's own blocks ──▶ part / total

Rows go in groups and keys in blocks, merged by a running log-sum-exp. The loops have traced bounds: a group reads as many blocks as its longest row
has, so one program serves every context length, and a row's bits do not depend on how long other rows are (a block that a row cannot see multiplies
its sums by exactly 1 and adds exactly 0), nor on whether its group shares: all that differs is the number of rows of a matrix product, whose sums run
over the same axis in the same order; `shares_exactly` proves it for a model's heads on the machine at hand.

With one query per row, kv heads are folded, a few at a time: block-diagonal queries make the products wider and read K and V as they lie. How many is
measured (two CPU cores, JAX 0.10 and 0.12): up to rows of 128 floats or a little more, wider ones cost more in zeros than they save.

    R row   C query of a row   N query heads   K kv heads   H head size   P page of a table   S key of a block
    U group of rows   E row of a group   F kv heads folded into one   J = K / F   Q queries of such a head   Z = F * H
"""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noria.sampler.pages import PAGE
from noria.sampler.sequence import BLOCK_PAGES, LANES_PER_TILE

_CHUNK_PAGES = 8
"""Pages of a key block with many queries per row: smaller ones are 10 % slower, larger ones no faster."""

_MIN_WIDTH, _MAX_WIDTH = 128, 320
"""Floats of a folded row, Z."""

_HIGHEST = jax.lax.Precision.HIGHEST
_NEVER = -1e30
"""Below every score: a start for running maxima whose differences are finite, unlike those of -inf."""


class _Keys(NamedTuple):
    """Where keys and values lie, and how many pages of them are read at once."""

    k_pages: jax.Array
    v_pages: jax.Array
    block_pages: int


class _Group(NamedTuple):
    """What a group of rows asks; with a leading axis U, all groups. num_shared, num_blocks: blocks."""

    q_JEQZ: jax.Array
    position_EQ: jax.Array
    table_EP: jax.Array
    num_shared: jax.Array
    num_blocks: jax.Array


class _Sums(NamedTuple):
    """Running over blocks: sum of weights times values, largest score, sum of weights."""

    part_JEQZ: jax.Array
    peak_JEQ: jax.Array
    total_JEQ: jax.Array


@partial(jax.named_call, name="attend_rows")
def attend_rows(
    q_RCNH: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table_RP: jax.Array,
    position_RC: jax.Array,
    *,
    rows_per_group: int,
    num_shared_U: jax.Array | None = None,
) -> jax.Array:
    """Queries of row r attend to the keys of row r's pages at positions up to their own; out [R, C, N, H], float32.

    k_pages, v_pages [pages, PAGE, K, H]; table_RP: page numbers in order. rows_per_group divides R. num_shared_U: so many pages
    from position 0 on are the same in all rows of a group that belong to a request, and end before the rows' first positions; 0 for none. None: no
    group shares.
    """
    num_rows, length, num_heads, size = q_RCNH.shape
    num_kv = k_pages.shape[2]
    block_pages = BLOCK_PAGES if length == 1 else _CHUNK_PAGES
    num_folded = _num_folded(num_kv, size) if length == 1 else 1
    q_UJEQZ = _queries(q_RCNH, num_kv, num_folded, rows_per_group)
    num_groups, num_queries = q_UJEQZ.shape[0], q_UJEQZ.shape[3]
    position_UEC = position_RC.reshape(num_groups, rows_per_group, length)
    table_RP = jnp.pad(table_RP, ((0, 0), (0, -table_RP.shape[1] % block_pages)))
    groups = _Group(
        q_UJEQZ,
        jnp.tile(position_UEC, (1, 1, num_queries // length)),
        table_RP.reshape(num_groups, rows_per_group, -1),
        jnp.zeros(num_groups, jnp.int32) if num_shared_U is None else num_shared_U // block_pages,
        position_UEC.max((1, 2)) // (block_pages * PAGE) + 1,
    )
    keys = _Keys(k_pages, v_pages, block_pages)

    def attend(u: jax.Array, out_UJEQZ: jax.Array) -> jax.Array:
        group = jax.tree.map(lambda x: x[u], groups)
        sums = _Sums(jnp.zeros_like(group.q_JEQZ), jnp.full(group.q_JEQZ.shape[:-1], _NEVER), jnp.zeros(group.q_JEQZ.shape[:-1]))
        if num_shared_U is not None:
            sums = jax.lax.fori_loop(0, group.num_shared, partial(_add_block, keys, group, is_shared=True), sums)
        sums = jax.lax.fori_loop(group.num_shared, group.num_blocks, partial(_add_block, keys, group, is_shared=False), sums)
        updated: jax.Array = jax.lax.dynamic_update_index_in_dim(out_UJEQZ, sums.part_JEQZ / sums.total_JEQ[..., None], u, 0)
        return updated

    out_UJEQZ: jax.Array = jax.lax.fori_loop(0, num_groups, attend, jnp.zeros_like(q_UJEQZ))
    return _outputs(out_UJEQZ, num_folded, (num_rows, length, num_heads, size))


@cache
def shares_exactly(num_heads: int, num_kv: int, size: int) -> bool:
    """Whether lanes get the same bits from a shared prefix as from their own reading of it: sharing must not be seen by a seeded request.

    True for all 22 shapes of heads that were tried on two CPU cores, JAX 0.10 and 0.12. But XLA may split a product along the summed axis, by its
    shape and the number of cores (with blocks of 128 keys it did so for 15 / 5 heads of 64): so it is tried where it counts, in its own program.
    """
    rng = np.random.default_rng(0)
    num_pages = 4 * BLOCK_PAGES
    pools = [rng.normal(size=(1 + num_pages + LANES_PER_TILE, PAGE, num_kv, size)).astype(np.float32) for _ in range(2)]
    q = rng.normal(size=(LANES_PER_TILE, 1, num_heads, size)).astype(np.float32)
    own = 1 + num_pages + np.arange(LANES_PER_TILE)[:, None]
    table = np.concatenate((np.tile(1 + np.arange(num_pages), (LANES_PER_TILE, 1)), own), axis=1).astype(np.int32)
    position = num_pages * PAGE + np.arange(LANES_PER_TILE, dtype=np.int32)[:, None]
    attend = jax.jit(partial(attend_rows, rows_per_group=LANES_PER_TILE))
    apart, shared = (np.asarray(attend(q, *pools, table, position, num_shared_U=np.full(1, n, np.int32))) for n in (0, num_pages))
    return np.array_equal(apart, shared)


def _add_block(keys: _Keys, group: _Group, index: jax.Array, sums: _Sums, *, is_shared: bool) -> _Sums:
    """The sums with one block more. Shared: its keys are read from the first row, for all rows' queries as one matrix."""
    heads, rows, queries, width = group.q_JEQZ.shape
    table_EP = group.table_EP[:1] if is_shared else group.table_EP
    pages_EP = jax.lax.dynamic_slice_in_dim(table_EP, index * keys.block_pages, keys.block_pages, axis=1)
    k_JESZ, v_JESZ = (_gather(pool, pages_EP, heads) for pool in (keys.k_pages, keys.v_pages))
    matrix = (heads, 1, rows * queries) if is_shared else (heads, rows, queries)
    scores = _product(group.q_JEQZ.reshape(*matrix, width), k_JESZ, 3).reshape(heads, rows, queries, -1)
    key_S = index * keys.block_pages * PAGE + jnp.arange(keys.block_pages * PAGE)
    scores = jnp.where(key_S <= group.position_EQ[..., None], scores, -jnp.inf)
    peak = jnp.maximum(sums.peak_JEQ, scores.max(-1))
    keep, weight = jnp.exp(sums.peak_JEQ - peak), jnp.exp(scores - peak[..., None])
    add = _product(weight.reshape(*matrix, -1), v_JESZ, 2).reshape(group.q_JEQZ.shape)
    return _Sums(sums.part_JEQZ * keep[..., None] + add, peak, sums.total_JEQ * keep + weight.sum(-1))


def _product(x_JEQX: jax.Array, y_JE: jax.Array, axis: int) -> jax.Array:
    """x's last axis against this axis of y; per head and row. One row: without the row's axis, so that XLA sees one matrix per head."""
    if x_JEQX.shape[1] == 1:
        return jax.lax.dot_general(x_JEQX[:, 0], y_JE[:, 0], (((2,), (axis - 1,)), ((0,), (0,))), precision=_HIGHEST)
    return jax.lax.dot_general(x_JEQX, y_JE, (((3,), (axis,)), ((0, 1), (0, 1))), precision=_HIGHEST)


def _gather(pool: jax.Array, pages_EP: jax.Array, heads: int) -> jax.Array:
    """The pages' keys or values in order, [J, E, S, Z]. Page numbers come from our own tables and are in bounds.

    Heads come first by a transposition that XLA fuses into the gather; left to the product, it copies once more (1.7 times slower at H = 128).
    """
    flat = pool.reshape(pool.shape[0], -1).at[pages_EP].get(mode="promise_in_bounds")
    heads_first: jax.Array = flat.reshape(pages_EP.shape[0], pages_EP.shape[1] * PAGE, heads, -1).transpose(2, 0, 1, 3)
    return heads_first


def _num_folded(num_kv: int, size: int) -> int:
    """F: the fewest kv heads, at least two, that divide K and fill a row of _MIN_WIDTH to _MAX_WIDTH floats; all of them if they do not fill one.

    At least two, since products with a single query per kv head would become matrix times vector, which sums in another order.
    """
    if num_kv * size < _MIN_WIDTH:
        return num_kv
    wide = (f for f in range(2, num_kv + 1) if num_kv % f == 0 and _MIN_WIDTH <= f * size <= _MAX_WIDTH)
    return next(wide, 1)


def _queries(q_RCNH: jax.Array, num_kv: int, num_folded: int, rows_per_group: int) -> jax.Array:
    """Scaled queries [U, J, E, Q, Z], with zeros outside the query's own kv head where several are folded into one."""
    num_rows, length, num_heads, size = q_RCNH.shape
    shape = (num_rows // rows_per_group, rows_per_group, length, num_kv // num_folded, num_folded, num_heads // num_kv, size)
    q_UJEFGCH = (q_RCNH * size**-0.5).reshape(shape).transpose(0, 3, 1, 4, 5, 2, 6)
    if num_folded > 1:
        q_UJEFGCH = q_UJEFGCH[..., None, :] * jnp.eye(num_folded)[:, None, None, :, None]
    folded: jax.Array = q_UJEFGCH.reshape(shape[0], shape[3], rows_per_group, num_folded * shape[5] * length, num_folded * size)
    return folded


def _outputs(out_UJEQZ: jax.Array, num_folded: int, shape: tuple[int, int, int, int]) -> jax.Array:
    """The inverse of `_queries`: [R, C, N, H]."""
    num_groups, heads, rows_per_group = out_UJEQZ.shape[:3]
    length, size = shape[1], shape[3]
    blocks = out_UJEQZ.reshape(num_groups, heads, rows_per_group, num_folded, -1, length, num_folded, size)
    out_UJEFGCH = jnp.stack([blocks[:, :, :, head, :, :, head] for head in range(num_folded)], axis=3)
    return out_UJEFGCH.transpose(0, 2, 5, 1, 3, 4, 6).reshape(shape)
