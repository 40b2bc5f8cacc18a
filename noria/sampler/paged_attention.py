"""Attention over keys that lie in pages, without ever gathering a whole context: the sampler's sibling of `model.attention.attend`.

Rows go in groups and keys in blocks of 128 positions, merged by log-sum-exp. The loops have traced bounds: a group reads as many blocks as its
longest row has, so one program serves every context length, and a row's bits do not depend on how long other rows are (a block that a row cannot
see multiplies its sums by exactly 1 and adds exactly 0). Gathered blocks stay in the second-level cache: on two CPU cores 64 lanes of 128 positions
took 1.9 ms a layer instead of 14.

    R row   C query of a row   N query heads   K kv heads   H head size   P page of a table   S key of a block
    U group of rows   E row of a group   J heads that are computed apart   Q queries of such a head   Z features of such a head
"""

from functools import partial

import jax
import jax.numpy as jnp

from noria.sampler.pages import PAGE

BLOCK_PAGES = 8
"""Pages of a key block: 128 positions, after which larger blocks are no faster (measured)."""

_HIGHEST = jax.lax.Precision.HIGHEST
_NEVER = -1e30
"""Below every score: a start for running maxima whose differences are finite, unlike those of -inf."""


@partial(jax.named_call, name="attend_rows")
def attend_rows(
    q_RCNH: jax.Array, k_pages: jax.Array, v_pages: jax.Array, table_RP: jax.Array, position_RC: jax.Array, *, rows_per_group: int
) -> jax.Array:
    """Queries of row r attend to the keys of row r's pages at positions up to their own; out [R, C, N, H], float32.

    k_pages, v_pages [pages, PAGE, K, H]; table_RP: page numbers in order, P a multiple of BLOCK_PAGES. rows_per_group divides R.

    With one query per row, all heads are computed as one with block-diagonal queries: three times the products, but K and V are read as they lie.
    """
    num_rows, length, num_heads, size = q_RCNH.shape
    num_kv = k_pages.shape[2]
    is_folded = length == 1
    q_URJQZ = _queries(q_RCNH, num_kv, rows_per_group, is_folded=is_folded)
    heads = q_URJQZ.shape[2]
    position_URC = position_RC.reshape(-1, rows_per_group, length)
    position_URQ = jnp.tile(position_URC, (1, 1, q_URJQZ.shape[3] // length))
    table_URP = table_RP.reshape(-1, rows_per_group, table_RP.shape[1])
    num_blocks_U = position_URC.max((1, 2)) // (BLOCK_PAGES * PAGE) + 1

    def group(u: jax.Array, out: jax.Array) -> jax.Array:
        q_EJQZ, position_EQ, table_EP = q_URJQZ[u], position_URQ[u], table_URP[u]

        def block(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            part, peak, total = carry
            pages = jax.lax.dynamic_slice_in_dim(table_EP, index * BLOCK_PAGES, BLOCK_PAGES, axis=1)
            k_ESJZ, v_ESJZ = (_gather(x, pages, heads) for x in (k_pages, v_pages))
            if is_folded:  # the larger operand first: it stays as it lies, a quarter faster
                scores = jax.lax.dot_general(k_ESJZ, q_EJQZ, (((3,), (3,)), ((0, 2), (0, 1))), precision=_HIGHEST).swapaxes(2, 3)
            else:
                scores = jax.lax.dot_general(q_EJQZ, k_ESJZ, (((3,), (3,)), ((0, 1), (0, 2))), precision=_HIGHEST)
            key_S = index * BLOCK_PAGES * PAGE + jnp.arange(BLOCK_PAGES * PAGE)
            scores = jnp.where(key_S <= position_EQ[:, None, :, None], scores, -jnp.inf)
            new_peak = jnp.maximum(peak, scores.max(-1))
            keep, weight = jnp.exp(peak - new_peak), jnp.exp(scores - new_peak[..., None])
            add = jax.lax.dot_general(weight, v_ESJZ, (((3,), (1,)), ((0, 1), (0, 2))), precision=_HIGHEST)
            return part * keep[..., None] + add, new_peak, total * keep + weight.sum(-1)

        start = jnp.zeros_like(q_EJQZ), jnp.full(q_EJQZ.shape[:-1], _NEVER), jnp.zeros(q_EJQZ.shape[:-1])
        part, _, total = jax.lax.fori_loop(0, num_blocks_U[u], block, start)
        updated: jax.Array = jax.lax.dynamic_update_index_in_dim(out, part / total[..., None], u, 0)
        return updated

    out_URJQZ = jax.lax.fori_loop(0, q_URJQZ.shape[0], group, jnp.zeros_like(q_URJQZ))
    return _outputs(out_URJQZ, num_kv, (num_rows, length, num_heads, size), is_folded=is_folded)


def _queries(q_RCNH: jax.Array, num_kv: int, rows_per_group: int, *, is_folded: bool) -> jax.Array:
    """Scaled queries [U, E, J, Q, Z]: per kv head (J = K, Z = H), or folded (J = 1, Z = K * H, zeros outside the query's own kv head)."""
    num_rows, length, num_heads, size = q_RCNH.shape
    group = num_heads // num_kv
    q = (q_RCNH * size**-0.5).reshape(num_rows, length, num_kv, group, size).transpose(0, 2, 3, 1, 4).reshape(num_rows, num_kv, group * length, size)
    if is_folded:
        q = (q[:, :, :, None, :] * jnp.eye(num_kv)[:, None, :, None]).reshape(num_rows, 1, num_kv * group * length, num_kv * size)
    blocks: jax.Array = q.reshape(-1, rows_per_group, *q.shape[1:])
    return blocks


def _outputs(out_URJQZ: jax.Array, num_kv: int, shape: tuple[int, int, int, int], *, is_folded: bool) -> jax.Array:
    """The inverse of `_queries`: [R, C, N, H]."""
    num_rows, length, num_heads, size = shape
    group = num_heads // num_kv
    if is_folded:
        blocks = out_URJQZ.reshape(num_rows, num_kv, group * length, num_kv, size)
        out = jnp.stack([blocks[:, head, :, head] for head in range(num_kv)], axis=1)
    else:
        out = out_URJQZ
    result: jax.Array = out.reshape(num_rows, num_kv, group, length, size).transpose(0, 3, 1, 2, 4).reshape(shape)
    return result


def _gather(pool: jax.Array, pages_EP: jax.Array, heads: int) -> jax.Array:
    """The pages' keys or values in order, [E, S, J, Z]. Page numbers come from our own tables and are in bounds."""
    flat: jax.Array = pool.reshape(pool.shape[0], -1).at[pages_EP].get(mode="promise_in_bounds")
    return flat.reshape(pages_EP.shape[0], pages_EP.shape[1] * PAGE, heads, -1)
