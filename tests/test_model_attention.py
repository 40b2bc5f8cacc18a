"""The attention primitive against dense masked attention on random trees."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.model.attention import Pairs, attend
from noria.types import TILE


def random_end(rng, length):
    """End of each position's subtree for a random forest over `length` positions in depth-first order."""
    end = np.empty(length, np.int32)
    stack = []
    for j in range(length):
        while stack and rng.random() < 0.02:
            end[stack.pop()] = j
        stack.append(j)
    for j in stack:
        end[j] = length
    for j in reversed(range(length - 1)):  # a position ends no earlier than its descendants
        end[j] = max(end[j], j + 1)
    return end


def block_pairs(visible, padding=0):
    blocks = len(visible) // TILE
    found = [(i, j) for i in range(blocks) for j in range(i + 1) if visible[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE].any()]
    query, key = np.array(found, np.int32).T
    return Pairs(jnp.asarray(np.pad(query, (0, padding))), jnp.asarray(np.pad(key, (0, padding))), jnp.int32(len(found)))


def dense(q, k, v, visible):
    repeat = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, repeat, 1), jnp.repeat(v, repeat, 1)
    scores = jnp.where(visible, jnp.einsum("inh,jnh->nij", q, k) * q.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("nij,jnh->inh", jax.nn.softmax(scores, -1), v), jax.nn.logsumexp(scores, -1).T


def random_case(seed, blocks):
    rng = np.random.default_rng(seed)
    length = blocks * TILE
    end = random_end(rng, length)
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    q, k, v = (jnp.asarray(rng.normal(size=(length, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    return q, k, v, end, (j <= i) & (i < end[None, :])


@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_attend_equals_dense_attention_under_the_mask_rule_with_gradients(seed, blocks):
    q, k, v, end, visible = random_case(seed, blocks)
    pairs = block_pairs(visible, padding=3)

    def ours(q, k, v):
        out, lse = attend(q, k, v, pairs, jnp.asarray(end))
        return (jnp.sin(out)).sum() + (lse * jnp.cos(lse)).sum(), (out, lse)

    def naive(q, k, v):
        out, lse = dense(q, k, v, visible)
        return (jnp.sin(out)).sum() + (lse * jnp.cos(lse)).sum(), (out, lse)

    grads, (out, lse) = jax.grad(ours, (0, 1, 2), has_aux=True)(q, k, v)
    want_grads, (want_out, want_lse) = jax.grad(naive, (0, 1, 2), has_aux=True)(q, k, v)
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=2e-6)
    for got, want in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_a_neighbours_nan_does_not_reach_another_tile():
    q, k, v, _, _ = random_case(0, 2)
    end = np.repeat([TILE, 2 * TILE], TILE).astype(np.int32)
    i, j = np.arange(2 * TILE)[:, None], np.arange(2 * TILE)[None, :]
    pairs = block_pairs((j <= i) & (i < end))
    clean, _ = attend(q, k, v, pairs, jnp.asarray(end))
    dirty, _ = attend(q.at[:TILE].set(jnp.nan), k.at[:TILE].set(jnp.nan), v.at[:TILE].set(jnp.nan), pairs, jnp.asarray(end))
    assert np.isnan(dirty[:TILE]).all()
    assert (np.asarray(dirty[TILE:]) == np.asarray(clean[TILE:])).all()


def test_positions_in_no_pair_have_zero_output_and_minus_infinite_lse():
    q, k, v, end, _ = random_case(1, 2)
    pairs = Pairs(jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32), jnp.int32(1))
    out, lse = attend(q, k, v, pairs, jnp.asarray(end))
    assert (np.asarray(out[TILE:]) == 0).all()
    assert np.isneginf(lse[TILE:]).all()
