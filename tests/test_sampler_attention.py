"""Paged attention in groups and blocks equals the plain form, whatever lies in positions that a row does not see."""

import jax
import numpy as np
import pytest

from noria.sampler.paged_attention import BLOCK_PAGES, attend_rows, regroups_exactly
from noria.sampler.pages import PAGE

attend = jax.jit(attend_rows, static_argnames=("rows_per_group", "is_joint"))


HEADS = [(9, 3, 64), (4, 2, 16), (14, 2, 64), (15, 5, 64), (8, 8, 64), (16, 8, 128), (16, 16, 128), (8, 1, 256)]
"""SmolLM2-135M, the tiny base, Qwen2-0.5B, SmolLM2-360M, one query head per kv head, Qwen3-0.6B, the same wider, one kv head."""


def inputs(num_rows, length, longest, *, seed=0, num_pages=80, heads=(6, 2, 8), table_pages=16):
    num_heads, num_kv, size = heads
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(num_rows, length, num_heads, size)).astype(np.float32)
    k, v = (rng.normal(size=(num_pages, PAGE, num_kv, size)).astype(np.float32) for _ in range(2))
    table = rng.integers(1, num_pages, (num_rows, table_pages)).astype(np.int32)
    first = rng.integers(0, longest - length + 1, num_rows)
    return q, k, v, table, (first[:, None] + np.arange(length)).astype(np.int32)


def attend_plainly(q, k_pages, v_pages, table, position):
    """Every row alone: gather its keys, mask, softmax."""
    out = np.empty_like(q)
    for row in range(len(q)):
        k, v = (np.repeat(x[table[row]].reshape(-1, *x.shape[2:]), q.shape[2] // x.shape[2], axis=1) for x in (k_pages, v_pages))
        scores = np.einsum("cnh,snh->ncs", q[row], k) * q.shape[3] ** -0.5
        weights = np.exp(np.where(np.arange(len(k)) <= position[row][:, None], scores, -np.inf))
        out[row] = np.einsum("ncs,snh->cnh", weights / weights.sum(-1, keepdims=True), v)
    return out


@pytest.mark.parametrize(("length", "rows_per_group", "longest"), [(1, 8, 250), (1, 8, 20), (32, 2, 250), (32, 1, 60)])
@pytest.mark.parametrize("is_joint", [False, True])
def test_rows_attend_as_in_the_plain_form(length, rows_per_group, longest, is_joint):
    arrays = inputs(8, length, longest)
    out = attend(*arrays, rows_per_group=rows_per_group, is_joint=is_joint)
    np.testing.assert_allclose(out, attend_plainly(*arrays), atol=2e-6)


def shared_inputs(num_shared, heads=(6, 2, 8), length=1, rows_per_group=8):
    """Two groups whose rows have that many pages in common, then one to four pages of their own."""
    q, k, v, table, _ = inputs(2 * rows_per_group, length, length, heads=heads, table_pages=num_shared + 4)
    table[:, :num_shared] = np.repeat(table[::rows_per_group, :num_shared], rows_per_group, axis=0)
    own = np.random.default_rng(1).integers(0, 4 * PAGE - length + 1, len(q))
    return q, k, v, table, (num_shared * PAGE + own[:, None] + np.arange(length)).astype(np.int32)


def pages_of_groups(*num_pages):
    return np.array(num_pages, np.int32)


@pytest.mark.parametrize("heads", HEADS[1::2])
def test_heads_of_every_kind_attend_as_in_the_plain_form(heads):
    arrays = inputs(8, 1, 150, heads=heads)
    np.testing.assert_allclose(attend(*arrays, rows_per_group=8), attend_plainly(*arrays), atol=5e-6)


def test_a_table_that_is_no_multiple_of_a_block_is_read_to_its_end():
    for length in (1, 32):
        arrays = inputs(4, length, 13 * PAGE, table_pages=13)
        arrays[4][0] += 13 * PAGE - 1 - arrays[4][0, -1]
        np.testing.assert_allclose(attend(*arrays, rows_per_group=2), attend_plainly(*arrays), atol=2e-6)


@pytest.mark.parametrize(("length", "rows_per_group"), [(1, 8), (32, 2)])
@pytest.mark.parametrize("num_shared", [BLOCK_PAGES, 4 * BLOCK_PAGES])
@pytest.mark.parametrize("is_joint", [False, True])
def test_rows_that_share_a_prefix_attend_as_in_the_plain_form(length, rows_per_group, num_shared, is_joint):
    arrays = shared_inputs(num_shared, length=length, rows_per_group=rows_per_group)
    out = attend(*arrays, rows_per_group=rows_per_group, num_shared_U=pages_of_groups(num_shared, 0), is_joint=is_joint)
    np.testing.assert_allclose(out, attend_plainly(*arrays), atol=2e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("is_joint", [False, True])
def test_a_row_keeps_its_bits_whether_its_group_shares_or_not(heads, is_joint):
    num_shared = 4 * BLOCK_PAGES
    arrays = shared_inputs(num_shared, heads)
    apart = attend(*arrays, rows_per_group=8, num_shared_U=pages_of_groups(0, 0))
    assert regroups_exactly(heads, 16, np.float32)
    for shared in (BLOCK_PAGES, 0), (BLOCK_PAGES, num_shared), (num_shared, 2 * BLOCK_PAGES):
        assert np.array_equal(apart, attend(*arrays, rows_per_group=8, num_shared_U=pages_of_groups(*shared), is_joint=is_joint))


def test_the_shared_pages_of_other_rows_are_not_read():
    num_shared = 2 * BLOCK_PAGES
    q, k, v, table, position = shared_inputs(num_shared)
    shared = pages_of_groups(num_shared, num_shared)
    out = attend(q, k, v, table, position, rows_per_group=8, num_shared_U=shared)
    table[1:8, :num_shared] = 0
    table[9:, :num_shared] = 0
    assert np.array_equal(out, attend(q, k, v, table, position, rows_per_group=8, num_shared_U=shared))


def test_a_row_of_a_sharing_group_that_is_not_finite_stays_alone():
    num_shared = BLOCK_PAGES
    q, *rest = shared_inputs(num_shared)
    shared = pages_of_groups(num_shared, num_shared)
    clean = np.asarray(attend(q, *rest, rows_per_group=8, num_shared_U=shared))
    q[3] = np.nan
    broken = np.asarray(attend(q, *rest, rows_per_group=8, num_shared_U=shared))
    assert np.isnan(broken[3]).all()
    assert np.array_equal(np.delete(clean, 3, 0), np.delete(broken, 3, 0))


@pytest.mark.parametrize(("length", "rows_per_group"), [(1, 8), (32, 2)])
@pytest.mark.parametrize("is_joint", [False, True])
def test_a_row_keeps_its_bits_when_its_neighbours_grow(length, rows_per_group, is_joint):
    q, k, v, table, position = inputs(16, length, 60)
    alone = attend(q, k, v, table, position, rows_per_group=rows_per_group)
    position[1:] += 180
    q[1:] *= 2
    beside = attend(q, k, v, table, position, rows_per_group=rows_per_group, is_joint=is_joint)
    assert np.array_equal(alone[0], beside[0])


def test_unseen_keys_that_are_not_finite_do_not_leak():
    q, k, v, table, position = inputs(8, 1, 20)
    table[:] = np.arange(1, 9)[:, None]
    position[:] = 5
    clean = attend(q, k, v, table, position, rows_per_group=8)
    k[:, 6:] = np.nan
    assert np.array_equal(clean, attend(q, k, v, table, position, rows_per_group=8))
