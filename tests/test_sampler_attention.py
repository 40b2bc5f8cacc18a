"""Paged attention in groups and blocks equals the plain form, whatever lies in positions that a row does not see."""

import jax
import numpy as np
import pytest

from noria.sampler.paged_attention import BLOCK_PAGES, attend_rows
from noria.sampler.pages import PAGE

attend = jax.jit(attend_rows, static_argnames="rows_per_group")


def inputs(num_rows, length, longest, seed=0, num_pages=80):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(num_rows, length, 6, 8)).astype(np.float32)
    k, v = (rng.normal(size=(num_pages, PAGE, 2, 8)).astype(np.float32) for _ in range(2))
    table = rng.integers(1, num_pages, (num_rows, 2 * BLOCK_PAGES)).astype(np.int32)
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
def test_rows_attend_as_in_the_plain_form(length, rows_per_group, longest):
    arrays = inputs(8, length, longest)
    out = attend(*arrays, rows_per_group=rows_per_group)
    np.testing.assert_allclose(out, attend_plainly(*arrays), atol=2e-6)


@pytest.mark.parametrize(("length", "rows_per_group"), [(1, 8), (32, 2)])
def test_a_row_keeps_its_bits_when_its_neighbours_grow(length, rows_per_group):
    q, k, v, table, position = inputs(8, length, 60)
    alone = attend(q, k, v, table, position, rows_per_group=rows_per_group)
    position[1:] += 180
    q[1:] *= 2
    beside = attend(q, k, v, table, position, rows_per_group=rows_per_group)
    assert np.array_equal(alone[0], beside[0])


def test_unseen_keys_that_are_not_finite_do_not_leak():
    q, k, v, table, position = inputs(8, 1, 20)
    table[:] = np.arange(1, 9)[:, None]
    position[:] = 5
    clean = attend(q, k, v, table, position, rows_per_group=8)
    k[:, 6:] = np.nan
    assert np.array_equal(clean, attend(q, k, v, table, position, rows_per_group=8))
