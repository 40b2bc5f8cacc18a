"""The attention primitive under the one mask rule (design section 5): position i attends to position j if and only if j <= i < end[j].

`attend` runs over the (query block, key block) pairs that the rule leaves non-empty; blocks that are not listed cost nothing, and partial
results merge by log-sum-exp. It has its own backward pass, so that no T x T array exists and nothing is stored but (out, lse). A chunk of a long tree
also reads the path that leads to it: an unmasked rectangle before the pairs (`Path`). Its sibling for keys that lie in pages is the sampler's
(`sampler/paged_attention.py`).

    T position   B block of 64 positions   X pair   N query heads   K kv heads   G = N / K query heads per kv head   H head size
    L layer   S block of 64 positions of a path   Q = B * G * 64 rows of queries
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from noria.types import TILE

_HIGHEST = jax.lax.Precision.HIGHEST


SPAN = 4
"""Blocks of a path that are read at once: one wide matrix product instead of four narrow ones. A path's axis S is a multiple of it."""


class Path(NamedTuple):
    """What a chunk reads of the positions before it: the keys and values on the way from the root, seen by every query of the chunk.

    k_LSKCH, v_LSKCH: [L, S, K, 64, H], S a multiple of SPAN. is_real_SC: bool [S, 64], false where a node's last block is padded. num_blocks: int32
    scalar, traced: the blocks that count, so that a short path in a long axis costs nothing.
    """

    k_LSKCH: jax.Array
    v_LSKCH: jax.Array
    is_real_SC: jax.Array
    num_blocks: jax.Array


class PathLayer(NamedTuple):
    """A path as one layer reads it. The layer is an index, so that no layer of the path is ever copied out."""

    path: Path
    layer: jax.Array


class Pairs(NamedTuple):
    """Block pairs, sorted by query block then key block (the order in which gradients add up); only the first `num` count.

    query_X, key_X: int32 block indices. num: int32 scalar, traced, so that padding costs nothing.
    """

    query_X: jax.Array
    key_X: jax.Array
    num: jax.Array


def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, pairs: Pairs, end_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of every position under the mask rule.

    q [T, N, H], k and v [T, K, H] float32, T a multiple of 64; end_T int32. Returns out [T, N, H] and lse [T, N] (natural log of the sum of
    exp(scores)), both float32; a position in no listed pair has out 0 and lse -inf. Differentiable in q, k, v through both results.
    """
    return _attend(q_TNH, k_TKH, v_TKH, pairs, end_T)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    return attend_forward(q, k, v, pairs, end)


def attend_forward(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, pairs: Pairs, end_T: jax.Array, *, before: PathLayer | None = None
) -> tuple[jax.Array, jax.Array]:
    """The forward pass of `attend`, for callers that keep (out, lse) and run `attend_backward` themselves. before: what all positions see too."""
    num_kv = k_TKH.shape[1]
    q_BKGH, k_BKCH, v_BKCH = _query_blocks(q_TNH, num_kv), _key_blocks(k_TKH), _key_blocks(v_TKH)
    end_BC = end_T.reshape(-1, TILE)
    rows = q_BKGH.shape[2]

    def pair_step(x: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, peak, total = carry
        i, j = pairs.query_X[x], pairs.key_X[x]
        scores = _scores(q_BKGH[i], k_BKCH[j], _visible(i, j, end_BC[j], rows))
        old_peak = peak[i]
        new_peak = jnp.maximum(old_peak, scores.max(-1))
        shift = jnp.where(jnp.isneginf(new_peak), 0.0, new_peak)
        keep, weight = jnp.exp(old_peak - shift), jnp.exp(scores - shift[..., None])
        part = jnp.einsum("kgc,kch->kgh", weight, v_BKCH[j], precision=_HIGHEST)
        return (
            out.at[i].set(out[i] * keep[..., None] + part),
            peak.at[i].set(new_peak),
            total.at[i].set(total[i] * keep + weight.sum(-1)),
        )

    start = (jnp.zeros_like(q_BKGH), jnp.full(q_BKGH.shape[:3], -jnp.inf), jnp.zeros(q_BKGH.shape[:3]))
    if before is not None:
        start = _path_forward(q_BKGH, before)
    out, peak, total = jax.lax.fori_loop(0, pairs.num, pair_step, start)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    lse_BKG = peak + jnp.log(total)
    return _unblock_queries(out, num_kv), _unblock_queries(lse_BKG[..., None], num_kv)[..., 0]


def _path_forward(q_BKGH: jax.Array, before: PathLayer) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out not yet divided, peak, total) of all queries over the path, as the pair loop carries them."""
    q_KQH = _rows_of(q_BKGH)

    def span_step(x: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, peak, total = carry
        k_KCH, v_KCH, is_seen_C = _span(before, x)
        scores = _scores(q_KQH, k_KCH, is_seen_C[None, :])
        new_peak = jnp.maximum(peak, scores.max(-1))
        shift = jnp.where(jnp.isneginf(new_peak), 0.0, new_peak)
        keep, weight = jnp.exp(peak - shift), jnp.exp(scores - shift[..., None])
        part = jnp.einsum("kgc,kch->kgh", weight, v_KCH, precision=_HIGHEST)
        return out * keep[..., None] + part, new_peak, total * keep + weight.sum(-1)

    start = (jnp.zeros_like(q_KQH), jnp.full(q_KQH.shape[:2], -jnp.inf), jnp.zeros(q_KQH.shape[:2]))
    out, peak, total = jax.lax.fori_loop(0, _num_spans(before), span_step, start)
    blocks = q_BKGH.shape[0]
    return _blocks_of(out, blocks), _blocks_of(peak[..., None], blocks)[..., 0], _blocks_of(total[..., None], blocks)[..., 0]


class PathGradient(NamedTuple):
    """What is owed to a path's keys and values, but for its constant prefix: its first blocks, which get no gradient and need no memory for one.

    k_LSKCH, v_LSKCH: float32, S a multiple of SPAN, as many as the path's axis where nothing is constant. int32 scalars, traced: num_constant: blocks
    of the constant prefix, down to a multiple of SPAN; block s of the path is block s - num_constant here. num_owed: blocks behind the path that is
    read, which hold what is owed to the chunk that stands there; what stands in others is nobody's any more.
    """

    k_LSKCH: jax.Array
    v_LSKCH: jax.Array
    num_constant: jax.Array
    num_owed: jax.Array


def path_backward(
    q_TNH: jax.Array, before: PathLayer, outputs: tuple[jax.Array, jax.Array], d_out_TNH: jax.Array, sums: PathGradient
) -> tuple[jax.Array, PathGradient]:
    """The part of the backward pass that goes through the path: the cotangent of q, and the gradient of the path's keys and values added to `sums`.

    outputs: (out [T, N, H], lse [T, N]) of the forward pass over path and pairs. sums: updated in place at this layer; only the path's own blocks
    change. The constant prefix costs three products a span where the rest costs five: q's cotangent is owed to its keys too.
    """
    num_kv = before.path.k_LSKCH.shape[2]
    out_TNH, lse_TN = outputs
    q_BKGH = _query_blocks(q_TNH, num_kv)
    q, d_out = _rows_of(q_BKGH), _rows_of(_query_blocks(d_out_TNH, num_kv))
    lse = _rows_of(_query_blocks(lse_TN[..., None], num_kv))
    shift = _rows_of(_query_blocks((d_out_TNH * out_TNH).sum(-1, keepdims=True), num_kv))
    scale = q.shape[-1] ** -0.5

    def scores_of(x: jax.Array, d_q: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """d_q with what it owes span x's keys; the span's probabilities, and their scores' cotangents."""
        k_KCH, v_KCH, is_seen_C = _span(before, x)
        weight = jnp.exp(_scores(q, k_KCH, is_seen_C[None, :]) - lse)
        d_weight = jnp.einsum("kgh,kch->kgc", d_out, v_KCH, precision=_HIGHEST)
        d_scores = weight * (d_weight - shift) * scale
        return d_q + jnp.einsum("kgc,kch->kgh", d_scores, k_KCH, precision=_HIGHEST), weight, d_scores

    def span_step(x: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        d_q, d_k, d_v = carry
        d_q, weight, d_scores = scores_of(x, d_q)
        here = x - first
        return (
            d_q,
            _add_span(d_k, before.layer, here, jnp.einsum("kgc,kgh->kch", d_scores, q, precision=_HIGHEST)),
            _add_span(d_v, before.layer, here, jnp.einsum("kgc,kgh->kch", weight, d_out, precision=_HIGHEST)),
        )

    first = sums.num_constant // SPAN
    d_q = jax.lax.fori_loop(0, first, lambda x, d_q: scores_of(x, d_q)[0], jnp.zeros_like(q))
    d_q, d_k, d_v = jax.lax.fori_loop(first, _num_spans(before), span_step, (d_q, sums.k_LSKCH, sums.v_LSKCH))
    return _unblock_queries(_blocks_of(d_q, q_BKGH.shape[0]), num_kv), sums._replace(k_LSKCH=d_k, v_LSKCH=d_v)


def attend_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array, Pairs, jax.Array],
    out_TNH: jax.Array,
    lse_TN: jax.Array,
    d_out_TNH: jax.Array,
    d_lse_TN: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of (q, k, v). saved = (q, k, v, pairs, end) of the forward pass; d_lse None means zero.

    Per pair the probabilities are computed again from lse (Dao, FlashAttention-2, section 3.1). Key gradients add up in the order of the pairs.
    """
    q_TNH, k_TKH, v_TKH, pairs, end_T = saved
    num_kv = k_TKH.shape[1]
    q, k, v = _query_blocks(q_TNH, num_kv), _key_blocks(k_TKH), _key_blocks(v_TKH)
    d_out = _query_blocks(d_out_TNH, num_kv)
    lse = _query_blocks(lse_TN[..., None], num_kv)[..., 0]
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    shift_TN = (d_out_TNH * out_TNH).sum(-1) - (0.0 if d_lse_TN is None else d_lse_TN)
    shift = _query_blocks(shift_TN[..., None], num_kv)[..., 0]
    end_BC = end_T.reshape(-1, TILE)
    rows, scale = q.shape[2], q.shape[-1] ** -0.5

    def pair_step(x: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        d_q, d_k, d_v = carry
        i, j = pairs.query_X[x], pairs.key_X[x]
        weight = jnp.exp(_scores(q[i], k[j], _visible(i, j, end_BC[j], rows)) - lse[i][..., None])
        d_weight = jnp.einsum("kgh,kch->kgc", d_out[i], v[j], precision=_HIGHEST)
        d_scores = weight * (d_weight - shift[i][..., None]) * scale
        return (
            d_q.at[i].add(jnp.einsum("kgc,kch->kgh", d_scores, k[j], precision=_HIGHEST)),
            d_k.at[j].add(jnp.einsum("kgc,kgh->kch", d_scores, q[i], precision=_HIGHEST)),
            d_v.at[j].add(jnp.einsum("kgc,kgh->kch", weight, d_out[i], precision=_HIGHEST)),
        )

    d_q, d_k, d_v = jax.lax.fori_loop(0, pairs.num, pair_step, (jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)))
    return _unblock_queries(d_q, num_kv), _unblock_keys(d_k), _unblock_keys(d_v)


def _attend_fwd(q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, end: jax.Array):  # type: ignore[no-untyped-def]  # noqa: ANN202
    out, lse = attend_forward(q, k, v, pairs, end)
    return (out, lse), ((q, k, v, pairs, end), out, lse)


def _attend_bwd(residuals, cotangents):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    saved, out, lse = residuals
    return (*attend_backward(saved, out, lse, *cotangents), None, None)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _query_blocks(x_TNH: jax.Array, num_kv: int) -> jax.Array:
    """[T, N, H] -> [B, K, G * 64, H]: all queries that read one key block, so that each pair is K plain matmuls."""
    x = x_TNH.reshape(-1, TILE, num_kv, x_TNH.shape[1] // num_kv, x_TNH.shape[2])
    return x.transpose(0, 2, 3, 1, 4).reshape(x.shape[0], num_kv, -1, x.shape[-1])


def _rows_of(x_BKGH: jax.Array) -> jax.Array:
    """[B, K, G * 64, H] -> [K, Q, H]: all queries at once, for keys that all of them see."""
    return x_BKGH.swapaxes(0, 1).reshape(x_BKGH.shape[1], -1, x_BKGH.shape[3])


def _blocks_of(x_KQH: jax.Array, blocks: int) -> jax.Array:
    """The inverse of `_rows_of`."""
    return x_KQH.reshape(x_KQH.shape[0], blocks, -1, x_KQH.shape[2]).swapaxes(0, 1)


def _num_spans(before: PathLayer) -> jax.Array:
    return (before.path.num_blocks + SPAN - 1) // SPAN


def _span(before: PathLayer, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values [K, SPAN * 64, H] of the path's span x, and which of them count."""
    path, first = before.path, x * SPAN
    is_real = jax.lax.dynamic_slice_in_dim(path.is_real_SC, first, SPAN)
    is_counted = (first + jnp.arange(SPAN) < path.num_blocks)[:, None]
    k, v = (_flat_span(jax.lax.dynamic_slice(a, (before.layer, first, 0, 0, 0), (1, SPAN, *a.shape[2:]))) for a in (path.k_LSKCH, path.v_LSKCH))
    return k, v, (is_real & is_counted).reshape(-1)


def _flat_span(x_1SKCH: jax.Array) -> jax.Array:
    _, _, heads, _, size = x_1SKCH.shape
    return x_1SKCH[0].swapaxes(0, 1).reshape(heads, -1, size)


def _add_span(sums_LSKCH: jax.Array, layer: jax.Array, x: jax.Array, part_KCH: jax.Array) -> jax.Array:
    """Add a span's gradient in place."""
    part = part_KCH.reshape(part_KCH.shape[0], SPAN, TILE, -1).swapaxes(0, 1)[None]
    where = (layer, x * SPAN, 0, 0, 0)
    return jax.lax.dynamic_update_slice(sums_LSKCH, jax.lax.dynamic_slice(sums_LSKCH, where, part.shape) + part, where)


def _unblock_queries(x_BKGH: jax.Array, num_kv: int) -> jax.Array:
    blocks, _, rows, size = x_BKGH.shape
    x = x_BKGH.reshape(blocks, num_kv, rows // TILE, TILE, size).transpose(0, 3, 1, 2, 4)
    return x.reshape(blocks * TILE, -1, size)


def _key_blocks(x_TKH: jax.Array) -> jax.Array:
    """[T, K, H] -> [B, K, 64, H]."""
    return x_TKH.reshape(-1, TILE, *x_TKH.shape[1:]).swapaxes(1, 2)


def _unblock_keys(x_BKCH: jax.Array) -> jax.Array:
    return x_BKCH.swapaxes(1, 2).reshape(-1, x_BKCH.shape[1], x_BKCH.shape[3])


def _visible(i: jax.Array, j: jax.Array, end_C: jax.Array, rows: int) -> jax.Array:
    """The mask rule inside the pair (query block i, key block j): bool [G * 64, 64]."""
    query = i * TILE + jnp.tile(jnp.arange(TILE), rows // TILE)[:, None]
    key = j * TILE + jnp.arange(TILE)[None, :]
    return (key <= query) & (query < end_C[None, :])


def _scores(q_KGH: jax.Array, k_KCH: jax.Array, visible_GC: jax.Array) -> jax.Array:
    scores = jnp.einsum("kgh,kch->kgc", q_KGH, k_KCH, precision=_HIGHEST) * q_KGH.shape[-1] ** -0.5
    return jnp.where(visible_GC, scores, -jnp.inf)
