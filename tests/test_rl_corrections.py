"""Sums that know no order, and the masks that are more than a comparison."""

import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from losses_reference import second_moment_kept

from noria.rl.corrections import log_linear_proximal, second_moment_mask
from noria.rl.staleness import rate_scale
from noria.rl.sums import segment_sums

sums_of = jax.jit(segment_sums, static_argnames=("num_segments", "fraction_bits"))
masked_of = jax.jit(second_moment_mask)
terms = st.lists(st.floats(-20, 20, width=32), max_size=30)


@settings(max_examples=100, deadline=None)
@given(terms, st.randoms(use_true_random=False))
def test_a_segments_sum_is_exact_whatever_the_order_and_the_neighbours(values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    pad = [float("nan")] * (64 - len(values))

    def total(x: list[float], segment: int, beside: int) -> np.ndarray:
        segments = jnp.asarray([segment] * len(x) + [beside] * len(pad))
        return np.asarray(sums_of(jnp.asarray(x + pad, jnp.float32), jnp.arange(64) < len(x), segments, num_segments=64)[0])[segment]

    exact = sum(round(v * 2**25) for v in values)  # integers: Python's own arithmetic
    got = total(values, 3, 3)
    assert got == np.float32(exact / 2**25)
    assert got.tobytes() == total([values[k] for k in order], 40, 7).tobytes()


def test_thirty_thousand_equal_terms_lose_nothing():
    x = np.float32(math.log(0.7))
    total, count = sums_of(jnp.full(30_000, x), jnp.ones(30_000, bool), jnp.zeros(30_000, jnp.int32), num_segments=1)
    assert float(count[0]) == 30_000
    assert float(total[0]) == pytest.approx(float(x) * 30_000, rel=1e-7)


def test_a_nan_makes_its_own_sum_nan_if_it_counts():
    x, is_counted = jnp.asarray([1.0, jnp.nan, 2.0, jnp.nan]), jnp.asarray([True, True, True, False])
    total, count = sums_of(x, is_counted, jnp.asarray([0, 0, 1, 1]), num_segments=2)
    assert np.isnan(total[0])
    assert (float(total[1]), count.tolist()) == (2.0, [2.0, 1.0])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1, 1, width=32)), max_size=40), st.randoms(use_true_random=False))
def test_the_second_moment_mask_is_that_of_each_slot_alone_in_any_order(entries, random):
    caps = {0: 0.04, 1: 0.2, 2: math.inf}
    want, borders = {}, list[float]()
    for slot, cap in caps.items():
        mine = [k for k, (s, _) in enumerate(entries) if s == slot]
        kept = second_moment_kept([entries[k][1] for k in mine], 0.0 if math.isinf(cap) else cap, borders)
        want |= dict(zip(mine, kept, strict=True))
    assume(min(borders, default=1.0) > 1e-5)
    squares = sorted(x * x for _, x in entries)
    assume(all(b == a or b - a > 3e-6 for a, b in pairwise(squares)))
    order = list(range(len(entries)))
    random.shuffle(order)
    pad = 40 - len(entries)
    x_M = jnp.asarray([entries[k][1] for k in order] + [math.nan] * pad, jnp.float32)
    slot_M = jnp.asarray([entries[k][0] for k in order] + [0] * pad, jnp.int32)
    is_masked_M = masked_of(x_M, jnp.arange(40) < len(entries), slot_M, jnp.asarray(list(caps.values()), jnp.float32))
    assert is_masked_M.tolist() == [not want[k] for k in order] + [False] * pad


def test_the_second_moment_mask_neither_counts_nor_masks_a_nan():
    x_M = jnp.asarray([0.1, jnp.nan, 3.0])
    assert masked_of(x_M, jnp.ones(3, bool), jnp.zeros(3, jnp.int32), jnp.asarray([0.04])).tolist() == [False, False, True]


def test_everything_is_masked_if_the_smallest_square_is_too_large():
    x_M = jnp.asarray([1.0, -1.0, 20.0])
    assert masked_of(x_M, jnp.ones(3, bool), jnp.zeros(3, jnp.int32), jnp.asarray([0.04])).all()


def test_the_proximal_policy_lies_between_behavior_and_learner_by_versions():
    th, mu = jnp.float32(-1.0), jnp.float32(-3.0)
    expected = {(0, 0): -1.0, (0, 2): -1.0, (4, 0): -1.0, (4, 1): -1.5, (4, 2): -2.0, (4, 4): -3.0, (4, 9): -3.0, (1, 1): -3.0}
    for (staleness, lag), want in expected.items():
        assert float(log_linear_proximal(th, mu, jnp.int32(staleness), jnp.float32(lag))) == want


def test_the_stale_rate_is_off_by_default_and_falls_with_staleness():
    assert rate_scale(8, 0.0) == 1.0
    assert rate_scale(0, 3.0) == 1.0
    assert rate_scale(4, 0.5) == pytest.approx(1 / 3)
