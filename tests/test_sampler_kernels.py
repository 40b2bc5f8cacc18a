"""JAX's own kernels over pages behind `attend_rows`: interpreted on a CPU at tiny sizes, lowered for CUDA and TPU, compiled where there is one."""

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.tpu import force_tpu_interpret_mode
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from sampler_builders import SHAPES, adapter, engine, prompt, request, run, tiny

from noria.bench.kernels import compare
from noria.sampler import page_kernels
from noria.sampler.host_pages import HostPages
from noria.sampler.page_kernels import Kernel, attend_lanes, kernel_of, page_shape, write_positions
from noria.sampler.paged_attention import attend_rows
from noria.sampler.pages import PAGE, PageMove

KERNELS = [Kernel.TRITON, Kernel.MOSAIC]

on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="interprets kernels, which is for a CPU")


def inputs(heads, dtype, *, num_rows=8, table_pages=8, num_pages=30):
    """q, K and V with heads inside a position, table, position: contexts of one position, of all that a table holds, and in between."""
    num_heads, num_kv, size = heads
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(num_pages, PAGE, num_kv, size)).astype(np.float32)).astype(dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(num_rows, 1, num_heads, size)).astype(np.float32))
    position = rng.integers(0, table_pages * PAGE, (num_rows, 1)).astype(np.int32)
    position[:2, 0] = 0, table_pages * PAGE - 1
    table = rng.integers(1, num_pages, (num_rows, table_pages)).astype(np.int32)
    return q, k, v, jnp.asarray(table), jnp.asarray(position)


def heads_first(*pools):
    return tuple(pool.swapaxes(1, 2) for pool in pools)


def attend(kernel, q, pools, table, position):
    with force_tpu_interpret_mode() if kernel == Kernel.MOSAIC else nullcontext():
        return np.asarray(attend_rows(q, *heads_first(*pools), table, position, rows_per_group=8, kernel=kernel))


def grouped(arrays):
    q, k, v, table, position = arrays
    return q, (k, v), table, position


def exactly(q, k, v, table, position):
    """The same in float64, row by row."""
    out = np.empty(q.shape)
    for row, keys in enumerate(np.asarray(table)):
        num = int(position[row, 0]) + 1
        keys, values = (np.asarray(pool[keys], np.float64).reshape(-1, *pool.shape[2:])[:num] for pool in (k, v))
        keys, values = (np.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (keys, values))
        scores = np.einsum("nh,snh->ns", np.asarray(q[row, 0], np.float64), keys) * q.shape[3] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row, 0] = np.einsum("ns,snh->nh", weights / weights.sum(-1, keepdims=True), values)
    return out


@on_a_cpu
@pytest.mark.parametrize("heads", [(4, 2, 16), (6, 2, 32), (9, 3, 64), (4, 4, 16), (8, 1, 16)])
def test_the_triton_kernel_gives_in_float32_what_loops_give(heads):
    arrays = inputs(heads, jnp.float32)
    want = attend_rows(*arrays, rows_per_group=8)
    np.testing.assert_allclose(attend(Kernel.TRITON, *grouped(arrays)), want, atol=1e-5)
    np.testing.assert_allclose(want, exactly(*arrays), atol=1e-5)


@on_a_cpu
@pytest.mark.parametrize(("kernel", "tolerance"), [(Kernel.MOSAIC, 1e-5), (Kernel.TRITON, 2**-6)])
@pytest.mark.parametrize("heads", [(4, 2, 16), (8, 1, 128)])
def test_a_kernel_over_bfloat16_pages_is_as_exact_as_it_says(kernel, tolerance, heads):
    """The TPU's multiplies bfloat16 keys with float32 queries and weights; Triton's takes products of bfloat16 and gives bfloat16, steps of 2^-8."""
    arrays = inputs(heads, jnp.bfloat16)
    np.testing.assert_allclose(attend(kernel, *grouped(arrays)), exactly(*arrays), atol=tolerance)


@on_a_cpu
def test_a_call_of_the_tpu_kernel_takes_as_many_rows_as_scalar_memory_holds(monkeypatch):
    arrays = inputs((4, 2, 16), jnp.bfloat16)
    whole = attend(Kernel.MOSAIC, *grouped(arrays))
    monkeypatch.setattr(page_kernels, "MAX_TABLE_BYTES", 5 * 4 * arrays[3].shape[1])
    assert np.array_equal(whole, attend(Kernel.MOSAIC, *grouped(arrays)))


@on_a_cpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_keeps_its_bits_whatever_its_neighbours_and_what_it_does_not_see(kernel):
    q, k, v, table, position = inputs((4, 2, 16), jnp.bfloat16, num_pages=9)
    table = jnp.tile(jnp.arange(1, 9, dtype=jnp.int32), (8, 1))
    position = position.at[3:].set(20)
    alone = attend(kernel, q, (k, v), table, position)
    others = [0, 1, 2, 4, 5, 6, 7]
    beside = attend(kernel, q.at[4].set(jnp.nan), (k.at[3:].multiply(5), v.at[3:].multiply(-7)), table, position.at[5].set(0))
    assert np.array_equal(alone[3], beside[3])
    assert not np.array_equal(alone[others], beside[others])
    assert np.isnan(beside[4]).all()


@pytest.mark.parametrize("length", [32, 5])
def test_prefills_read_pages_of_either_layout_to_the_same_bits(length):
    q, k, v, table, _ = inputs((6, 2, 16), jnp.float32, num_rows=4)
    q = jnp.tile(q, (1, length, 1, 1)) * jnp.arange(1, length + 1)[None, :, None, None]
    position = jnp.asarray([3, 90, 40, 0])[:, None] + jnp.arange(length)
    want = attend_rows(q, k, v, table, position, rows_per_group=2)
    assert np.array_equal(want, attend_rows(q, *heads_first(k, v), table, position, rows_per_group=2, kernel=Kernel.TRITON))


@pytest.mark.parametrize("kernel", list(Kernel))
def test_positions_are_written_where_a_layout_has_them(kernel):
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    pool = write_positions(jnp.zeros((4, *page_shape(kernel, 3, 8))), jnp.array([2, 1]), jnp.array([5, 0]), x, kernel)
    at = np.asarray(pool if kernel == Kernel.LOOPS else pool.swapaxes(1, 2))
    assert np.array_equal(at[2, 5], x[0])
    assert np.array_equal(at[1, 0], x[1])
    assert np.count_nonzero(at) == x.size


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pages_with_heads_first_wait_in_host_memory_and_come_back(is_pinned):
    model, rng = tiny()[0], np.random.default_rng(0)
    shape = (8, *page_shape(Kernel.TRITON, model.num_kv_heads, model.head_dim))
    k, v = (tuple(jnp.asarray(rng.normal(size=shape).astype(np.float32)) for _ in range(model.num_layers)) for _ in range(2))
    before = [np.asarray(x) for x in (*k, *v)]
    host = HostPages(model, 4, kernel=Kernel.TRITON, is_pinned=is_pinned)
    k, v = host.warm_up(k, v)
    host.store(k, v, [PageMove(3, 0)])
    k, v = host.load(k, v, [PageMove(5, 0)])
    for old, new in zip(before, map(np.asarray, (*k, *v)), strict=True):
        assert np.array_equal(new[5], old[3])
        assert np.array_equal(new[1:5], old[1:5])


def test_the_kernel_is_the_backends_where_it_serves_the_pages():
    bf16, fp32 = jnp.bfloat16, np.float32
    assert [kernel_of("cpu", size, bf16) for size in (64, 128)] == [Kernel.LOOPS] * 2
    assert [kernel_of("gpu", 64, dtype) for dtype in (bf16, fp32)] == [Kernel.TRITON] * 2
    assert [kernel_of("gpu", size, bf16) for size in (8, 80, 96)] == [Kernel.LOOPS] * 3
    assert [kernel_of("tpu", size, bf16) for size in (64, 128, 256)] == [Kernel.LOOPS, Kernel.MOSAIC, Kernel.MOSAIC]
    assert kernel_of("tpu", 128, fp32) == Kernel.LOOPS, "that kernel would round K and V to bfloat16"


@on_a_cpu
def test_an_engine_on_the_triton_kernel_samples_what_one_on_loops_samples():
    """With adapters, a shared prompt and pages that go to host memory and come back; and nobody shares reading."""
    samplers = [engine(shapes=replace(SHAPES, kernel=kernel), host_mib=4) for kernel in (None, Kernel.TRITON)]
    found = []
    for sampler in samplers:
        sampler.publish("a", 0, adapter(1), 0.5)
        asked = [request(prompt(70), run="a", max_tokens=6, seed=n, sample_index=n) for n in range(3)]
        found.append(run(sampler, *asked, request(prompt(20, seed=4), max_tokens=6), request((9,), max_tokens=6, temperature=0.0)))
    for loops, triton in zip(*found, strict=True):
        assert loops.sampled_ids == triton.sampled_ids
        np.testing.assert_allclose(loops.behavior_logprobs, triton.behavior_logprobs, atol=1e-5)


@on_a_cpu
@pytest.mark.parametrize(("kernel", "platform", "size"), [(Kernel.TRITON, "cuda", 64), (Kernel.TRITON, "cuda", 128), (Kernel.MOSAIC, "tpu", 128)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_kernel_lowers_for_its_device(monkeypatch, kernel, platform, size, dtype):
    """As far as a machine without one can say: to the kernel's own language, by this JAX."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if platform == "cuda" else platform)
    shape = jax.ShapeDtypeStruct
    pool = shape((100, *page_shape(kernel, 2, size)), dtype)
    asked = shape((8, 6, size), jnp.float32), (pool, pool), shape((8, 16), jnp.int32), shape((8,), jnp.int32)
    device = AbstractDevice("NVIDIA H200", 132, "gpu") if platform == "cuda" else None
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)) if device else nullcontext():
        lowered = jax.jit(lambda *arrays: attend_lanes(*arrays, kernel=kernel)).trace(*asked).lower(lowering_platforms=(platform,))
    assert ("xla.gpu.triton" if platform == "cuda" else "tpu_custom_call") in lowered.as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_this_devices_kernel_gives_what_loops_give(dtype):
    found = compare((16, 8, 128), jnp.dtype(dtype), num_lanes=32, num_pages=64)
    assert found["kernel"] == kernel_of(jax.default_backend(), 128, dtype)
    if found["kernel"] != Kernel.LOOPS:
        assert found["difference"] <= (1e-5 if dtype == jnp.float32 else 2**-6)


@pytest.mark.gpu
def test_an_engine_on_this_devices_kernel_samples_as_on_loops():
    loops, own = (run(engine(shapes=replace(SHAPES, kernel=kernel)), request(prompt(70), max_tokens=6, seed=2)) for kernel in (Kernel.LOOPS, None))
    np.testing.assert_allclose(loops[0].behavior_logprobs, own[0].behavior_logprobs, atol=1e-4)
    assert loops[0].sampled_ids == own[0].sampled_ids
