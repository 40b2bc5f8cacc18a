"""Attention over keys that lie in pages, without ever gathering a whole context: the sampler's sibling of `model.attention.attend`.

    a group's shared blocks: read once, from its first row ──▶ blocks that all groups have: all rows at once ──▶ the others: group by group

Rows go in groups and keys in blocks, merged by a running log-sum-exp. The loops have traced bounds: a group reads as many blocks as its longest row
has, so one program serves every context length, and a row's bits do not depend on how long other rows are (a block that a row cannot see multiplies
its sums by exactly 1 and adds exactly 0), nor on whether its group shares, nor on how many rows are read at once: all that differs is the number of
rows of a matrix product, or of products, whose sums run over the same axis in the same order; `regroups_exactly` tries it for a model's heads on the
machine at hand. All rows at once is what keeps two cores busy: 20 ms for 30 layers of SmolLM2 and 32 rows of 128 positions, 27 in groups of eight.

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
import numpy.typing as npt

from noria.sampler.page_kernels import Kernel, attend_lanes
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
    """Where keys and values lie, how many pages of a row are read at once, and what kernel pages are laid out for."""

    k_pages: jax.Array
    v_pages: jax.Array
    block_pages: int
    kernel: Kernel


class _Rows(NamedTuple):
    """What rows ask. position_EQ, table_EP: counted from the first page of the table on."""

    q_JEQZ: jax.Array
    position_EQ: jax.Array
    table_EP: jax.Array


class _Sums(NamedTuple):
    """Running over blocks: sum of weights times values, largest score, sum of weights."""

    part_JEQZ: jax.Array
    peak_JEQ: jax.Array
    total_JEQ: jax.Array


@partial(jax.named_call, name="attend_rows")
def attend_rows(  # noqa: PLR0913 - what is read, where it lies, and how, each by name
    q_RCNH: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table_RP: jax.Array,
    position_RC: jax.Array,
    *,
    rows_per_group: int,
    num_shared_U: jax.Array | None = None,
    is_joint: bool = False,
    kernel: Kernel = Kernel.LOOPS,
) -> jax.Array:
    """Queries of row r attend to the keys of row r's pages at positions up to their own; out [R, C, N, H], float32.

    k_pages, v_pages [pages, PAGE, K, H] (loops) or [pages, K, PAGE, H] (other kernels), float32 or bfloat16, in which products are taken; table_RP:
    page numbers in order. rows_per_group divides R.
    num_shared_U: so many pages from position 0 on are the same in all rows of a group that belong to a request, and end before the rows' first
    positions; 0 for none. None: no group shares. is_joint: blocks that all groups have are read for all rows at once. kernel: what attends for rows
    of one query, which reads each row by itself, and what pages are laid out for (`page_kernels`).
    """
    if kernel != Kernel.LOOPS and q_RCNH.shape[1] == 1:
        return attend_lanes(q_RCNH[:, 0], (k_pages, v_pages), table_RP, position_RC[:, 0], kernel=kernel)[:, None]
    num_rows, length, num_heads, size = q_RCNH.shape
    num_kv = k_pages.shape[2 if kernel == Kernel.LOOPS else 1]
    block_pages = BLOCK_PAGES if length == 1 else _CHUNK_PAGES
    num_folded = _num_folded(num_kv, size) if length == 1 else 1
    q_JRQZ = _queries(q_RCNH, num_kv, num_folded)
    rows = _Rows(
        q_JRQZ,
        jnp.tile(position_RC, (1, q_JRQZ.shape[2] // length)),
        jnp.pad(table_RP, ((0, 0), (0, -table_RP.shape[1] % block_pages))),
    )
    keys = _Keys(k_pages, v_pages, block_pages, kernel)
    last_U = position_RC.reshape(-1, rows_per_group * length).max(1)
    num_own_U = last_U // (block_pages * PAGE) + 1
    zeros_JRQ = jnp.zeros(q_JRQZ.shape[:-1])
    sums = _Sums(jnp.zeros_like(q_JRQZ), zeros_JRQ + _NEVER, zeros_JRQ)
    if num_shared_U is not None:
        num_blocks_U = num_shared_U // block_pages
        sums = _add_by_group(keys, rows, (jnp.zeros_like(num_blocks_U), num_blocks_U), sums, is_shared=True)
        rows, num_own_U = _after(rows, jnp.repeat(num_blocks_U, rows_per_group), block_pages), num_own_U - num_blocks_U
    num_joint = jnp.zeros((), jnp.int32)
    if is_joint:  # a group of padding asks for nothing, and can be taken along
        num_joint = jnp.where(last_U > 0, num_own_U, num_own_U.max()).min()
        sums = jax.lax.fori_loop(0, num_joint, partial(_add_block, keys, rows), sums)
    sums = _add_by_group(keys, rows, (jnp.broadcast_to(num_joint, num_own_U.shape), num_own_U), sums)
    return _outputs(sums.part_JEQZ / sums.total_JEQ[..., None], num_folded, (num_rows, length, num_heads, size))


_attend_lanes = jax.jit(attend_rows, static_argnames=("rows_per_group", "is_joint"))


@cache
def regroups_exactly(heads: tuple[int, int, int], num_rows: int, dtype: npt.DTypeLike) -> bool:
    """Whether a lane gets the same bits however blocks are read: for its group alone, for all lanes at once, or from a prefix that its group shares.
    None of these must be seen by a seeded request. heads: N, K, H. num_rows: lanes, a multiple of LANES_PER_TILE. dtype: of K and V.

    True for all 22 shapes of heads that were tried on two CPU cores, JAX 0.10 and 0.12. But XLA may split a product along the summed axis, by its
    shape and the number of cores (with blocks of 128 keys it did so for 15 / 5 heads of 64): so it is tried where it counts, in its own program.
    """
    num_heads, num_kv, size = heads
    rng = np.random.default_rng(0)
    num_pages = 4 * BLOCK_PAGES
    pools = [
        jnp.asarray(rng.normal(size=(1 + num_pages + num_rows, PAGE, num_kv, size)).astype(np.float32)).astype(np.dtype(dtype)) for _ in range(2)
    ]
    q = rng.normal(size=(num_rows, 1, num_heads, size)).astype(np.float32)
    own = 1 + num_pages + np.arange(num_rows)[:, None]
    table = np.concatenate((np.tile(1 + np.arange(num_pages), (num_rows, 1)), own), axis=1).astype(np.int32)
    position = num_pages * PAGE + np.arange(num_rows, dtype=np.int32)[:, None] % PAGE

    def attend(num_shared: int, *, is_joint: bool) -> npt.NDArray[np.float32]:
        num_shared_U = np.full(num_rows // LANES_PER_TILE, num_shared, np.int32)
        return np.asarray(_attend_lanes(q, *pools, table, position, rows_per_group=LANES_PER_TILE, num_shared_U=num_shared_U, is_joint=is_joint))

    apart = attend(0, is_joint=False)
    return np.array_equal(apart, attend(0, is_joint=True)) and np.array_equal(apart, attend(num_pages, is_joint=True))


def _add_by_group(keys: _Keys, rows: _Rows, blocks: tuple[jax.Array, jax.Array], sums: _Sums, *, is_shared: bool = False) -> _Sums:
    """The sums with blocks first_U .. end_U more, group after group. Nothing is done where no group has any."""
    first_U, end_U = blocks
    num_groups = len(first_U)
    size = rows.table_EP.shape[0] // num_groups

    def add(u: jax.Array, sums: _Sums) -> _Sums:
        def of_group(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, u * size, size, axis)

        group = _Rows(of_group(rows.q_JEQZ, 1), of_group(rows.position_EQ, 0), of_group(rows.table_EP, 0))
        own = _Sums(*(of_group(x, 1) for x in sums))
        own = jax.lax.fori_loop(first_U[u], end_U[u], partial(_add_block, keys, group, is_shared=is_shared), own)
        return _Sums(*(jax.lax.dynamic_update_slice_in_dim(x, new, u * size, 1) for x, new in zip(sums, own, strict=True)))

    added: _Sums = jax.lax.fori_loop(0, jnp.where(jnp.any(first_U < end_U), num_groups, 0), add, sums)
    return added


def _after(rows: _Rows, num_blocks_R: jax.Array, block_pages: int) -> _Rows:
    """The rows, counted from so many blocks on."""
    page_RP = num_blocks_R[:, None] * block_pages + jnp.arange(rows.table_EP.shape[1])
    table_RP = jnp.take_along_axis(rows.table_EP, jnp.minimum(page_RP, rows.table_EP.shape[1] - 1), axis=1)
    return rows._replace(position_EQ=rows.position_EQ - num_blocks_R[:, None] * (block_pages * PAGE), table_EP=table_RP)


def _add_block(keys: _Keys, rows: _Rows, index: jax.Array, sums: _Sums, *, is_shared: bool = False) -> _Sums:
    """The sums with one block more. Shared: its keys are read from the first row, for all rows' queries as one matrix."""
    heads, num_rows, queries, width = rows.q_JEQZ.shape
    table_EP = rows.table_EP[:1] if is_shared else rows.table_EP
    pages_EP = jax.lax.dynamic_slice_in_dim(table_EP, index * keys.block_pages, keys.block_pages, axis=1)
    gather = _gather if keys.kernel == Kernel.LOOPS else _gather_heads
    k_JESZ, v_JESZ = (gather(pool, pages_EP, heads) for pool in (keys.k_pages, keys.v_pages))
    matrix = (heads, 1, num_rows * queries) if is_shared else (heads, num_rows, queries)
    scores = _product(rows.q_JEQZ.reshape(*matrix, width), k_JESZ, 3).reshape(heads, num_rows, queries, -1)
    key_S = index * keys.block_pages * PAGE + jnp.arange(keys.block_pages * PAGE)
    scores = jnp.where(key_S <= rows.position_EQ[..., None], scores, -jnp.inf)
    peak = jnp.maximum(sums.peak_JEQ, scores.max(-1))
    keep, weight = jnp.exp(sums.peak_JEQ - peak), jnp.exp(scores - peak[..., None])
    add = _product(weight.reshape(*matrix, -1), v_JESZ, 2).reshape(rows.q_JEQZ.shape)
    return _Sums(sums.part_JEQZ * keep[..., None] + add, peak, sums.total_JEQ * keep + _sum_keys(weight))


def _product(x_JEQX: jax.Array, y_JE: jax.Array, axis: int) -> jax.Array:
    """x's last axis against this axis of y; per head and row. One row: without the row's axis, so that XLA sees one matrix per head."""
    product = partial(jax.lax.dot_general, precision=_HIGHEST, preferred_element_type=jnp.float32)
    x_JEQX = x_JEQX.astype(y_JE.dtype)
    if x_JEQX.shape[1] == 1:
        return product(x_JEQX[:, 0], y_JE[:, 0], (((2,), (axis - 1,)), ((0,), (0,))))
    return product(x_JEQX, y_JE, (((3,), (axis,)), ((0, 1), (0, 1))))


def _sum_keys(weight_JEQS: jax.Array) -> jax.Array:
    """Over the last axis, a power of two, by halves: XLA orders the sums of a reduction by the shape of all of it, and so by the number of rows."""
    while (size := weight_JEQS.shape[-1]) > 1:
        weight_JEQS = weight_JEQS[..., : size // 2] + weight_JEQS[..., size // 2 :]
    return weight_JEQS[..., 0]


def _gather(pool: jax.Array, pages_EP: jax.Array, heads: int) -> jax.Array:
    """The pages' keys or values in order, [J, E, S, Z]. Page numbers come from our own tables and are in bounds.

    Heads come first by a transposition that XLA fuses into the gather; left to the product, it copies once more (1.7 times slower at H = 128).
    """
    flat = pool.reshape(pool.shape[0], -1).at[pages_EP].get(mode="promise_in_bounds")
    heads_first: jax.Array = flat.reshape(pages_EP.shape[0], pages_EP.shape[1] * PAGE, heads, -1).transpose(2, 0, 1, 3)
    return heads_first


def _gather_heads(pool: jax.Array, pages_EP: jax.Array, heads: int) -> jax.Array:
    """`_gather` where heads come first in a page, and none are folded."""
    pages_EPKCH = pool.at[pages_EP].get(mode="promise_in_bounds")
    return pages_EPKCH.transpose(2, 0, 1, 3, 4).reshape(heads, pages_EP.shape[0], -1, pool.shape[-1])


def _num_folded(num_kv: int, size: int) -> int:
    """F: the fewest kv heads, at least two, that divide K and fill a row of _MIN_WIDTH to _MAX_WIDTH floats; all of them if they do not fill one.

    At least two, since products with a single query per kv head would become matrix times vector, which sums in another order.
    """
    if num_kv * size < _MIN_WIDTH:
        return num_kv
    wide = (f for f in range(2, num_kv + 1) if num_kv % f == 0 and _MIN_WIDTH <= f * size <= _MAX_WIDTH)
    return next(wide, 1)


def _queries(q_RCNH: jax.Array, num_kv: int, num_folded: int) -> jax.Array:
    """Scaled queries [J, R, Q, Z], with zeros outside the query's own kv head where several are folded into one."""
    num_rows, length, num_heads, size = q_RCNH.shape
    shape = (num_rows, length, num_kv // num_folded, num_folded, num_heads // num_kv, size)
    q_JRFGCH = (q_RCNH * size**-0.5).reshape(shape).transpose(2, 0, 3, 4, 1, 5)
    if num_folded > 1:
        q_JRFGCH = q_JRFGCH[..., None, :] * jnp.eye(num_folded)[:, None, None, :, None]
    folded: jax.Array = q_JRFGCH.reshape(shape[2], num_rows, num_folded * shape[4] * length, num_folded * size)
    return folded


def _outputs(out_JRQZ: jax.Array, num_folded: int, shape: tuple[int, int, int, int]) -> jax.Array:
    """The inverse of `_queries`: [R, C, N, H]."""
    num_rows, length, _, size = shape
    blocks = out_JRQZ.reshape(out_JRQZ.shape[0], num_rows, num_folded, -1, length, num_folded, size)
    out_JRFGCH = jnp.stack([blocks[:, :, head, :, :, head] for head in range(num_folded)], axis=2)
    return out_JRFGCH.transpose(1, 4, 0, 2, 3, 5).reshape(shape)
