"""Pages that wait in host memory come back with their bits, whichever memory the backend has, and moving them takes none."""

import tracemalloc
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from sampler_builders import tiny

from noria.sampler.host_pages import MOVE_WIDTH, HostPages
from noria.sampler.pages import PAGE, PageMove

NUM_PAGES = 48
MODES = pytest.mark.parametrize("is_pinned", [False, True])


def pools(seed=0):
    model = tiny()[0]
    rng = np.random.default_rng(seed)
    shape = (NUM_PAGES, PAGE, model.num_kv_heads, model.head_dim)
    return tuple(tuple(jnp.asarray(rng.normal(size=shape).astype(np.float32)) for _ in range(model.num_layers)) for _ in range(2))


@contextmanager
def compilations():
    """Names of what is compiled meanwhile."""
    names = []

    def listen(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        monitoring.unregister_event_duration_listener(listen)


def copies(*pair):
    return [np.array(x) for pool in pair for x in pool]


@MODES
def test_pages_come_back_bit_equal_to_other_pages_and_all_else_stays(is_pinned):
    host, (k, v) = HostPages(tiny()[0], 4, is_pinned=is_pinned), pools()
    before = copies(k, v)
    order = np.random.default_rng(1).permutation(np.arange(1, NUM_PAGES))
    sources, targets = order[:19].tolist(), order[20:39].tolist()
    places = np.random.default_rng(2).permutation(host.num_places)[:19].tolist()
    host.store(k, v, [PageMove(*move) for move in zip(sources, places, strict=True)])
    k, v = host.load(k, v, [PageMove(*move) for move in zip(targets, places, strict=True)])
    untouched = [page for page in range(1, NUM_PAGES) if page not in targets]
    for old, new in zip(before, copies(k, v), strict=True):
        assert np.array_equal(new[targets], old[sources])
        assert np.array_equal(new[untouched], old[untouched])


@MODES
def test_a_place_keeps_what_was_stored_when_the_page_is_written_again(is_pinned):
    host, (k, v) = HostPages(tiny()[0], 4, is_pinned=is_pinned), pools()
    before = copies(k, v)
    host.store(k, v, [PageMove(5, 0)])
    other = pools(seed=9)
    host.store(*other, [PageMove(5, 1)])
    k, v = host.load(*other, [PageMove(7, 0)])
    assert all(np.array_equal(new[7], old[5]) for old, new in zip(before, copies(k, v), strict=True))


@MODES
def test_padding_leaves_the_trash_page_finite(is_pinned):
    host, (k, v) = HostPages(tiny()[0], 4, is_pinned=is_pinned), pools()
    host.store(k, v, [PageMove(3, 2)])
    k, v = host.load(k, v, [PageMove(4, 2)])
    assert all(np.isfinite(x[0]).all() for x in copies(k, v))


def test_places_fill_the_memory_that_they_may_take():
    model = tiny()[0]
    page_bytes = 4 * 2 * PAGE * model.num_layers * model.num_kv_heads * model.head_dim
    assert HostPages(model, 3).num_places == 3 * 2**20 // page_bytes
    assert HostPages(model, 0).num_places == 0


def test_without_places_the_pools_pass_through():
    k, v = pools()
    assert HostPages(tiny()[0], 0).warm_up(k, v) == (k, v)


@MODES
def test_ten_thousand_moves_compile_nothing_and_take_no_memory(is_pinned):
    host, (k, v) = HostPages(tiny()[0], 4, is_pinned=is_pinned), pools()
    k, v = host.warm_up(k, v)
    rng = np.random.default_rng(0)

    def move(times):
        nonlocal k, v
        for _ in range(times):
            number = int(rng.integers(1, MOVE_WIDTH + 1))
            pages, places = (1 + rng.permutation(NUM_PAGES - 1))[:number].tolist(), rng.permutation(40)[:number].tolist()
            moves = [PageMove(*move) for move in zip(pages, places, strict=True)]
            host.store(k, v, moves)
            k, v = host.load(k, v, moves)
        jax.block_until_ready((k, v))

    before = copies(k, v)
    with compilations() as names:
        move(40)
        tracemalloc.start()
        num_arrays = len(jax.live_arrays())
        start = tracemalloc.get_traced_memory()[0]
        move(10_000 // MOVE_WIDTH)
        grown = tracemalloc.get_traced_memory()[0] - start
        tracemalloc.stop()
    assert names == []
    assert len(jax.live_arrays()) <= num_arrays + MOVE_WIDTH
    assert grown < 2**18
    assert all(np.array_equal(old[1:], new[1:]) for old, new in zip(before, copies(k, v), strict=True))
