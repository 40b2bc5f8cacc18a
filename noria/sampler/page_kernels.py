"""Kernels of JAX's own that attend over pages, for accelerators; which one, and how pages lie for it.

    loops     our own (`sampler.paged_attention`), anywhere                                    a page is [PAGE, K, H]
    triton    jax.experimental.pallas.ops.gpu.paged_attention, for decoding on CUDA            a page is [K, PAGE, H]
    mosaic    jax.experimental.pallas.ops.tpu.paged_attention, for decoding on TPU, bfloat16   a page is [K, PAGE, H]

Both kernels want a pool [heads, pages, PAGE, H]. A transposition would copy the pool at each step. With heads first within a page, the pool is a pool
of one head and K times as many pages, without moving a byte: page p of head k is page p * K + k, and a row of K kv heads is K rows of the kernel. So
pages stay the first axis of every pool, and whoever copies, stores or loads pages need not know.

A kernel reads a row's whole context from its own table: no row's bits depend on other rows, nor on what they share. Neither gives the logarithm of
its sum (they compute it and drop it), so nothing can be merged with it: prefixes that rows share are shared in memory, not in reading.

They are imported where they are used: a CPU has no need of Pallas, and JAX 0.12 calls Triton's deprecated, without naming another over pages.

The TPU kernel masks by adding, and so K must be finite in every page, as V must; and it rounds K and V to bfloat16, whatever they are.

    R row   N query heads   K kv heads   G = N / K   H head size   P page of a table   W position
"""

import math
from enum import StrEnum
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy.typing as npt

from noria.sampler.pages import PAGE
from noria.sampler.sequence import BLOCK_PAGES

MAX_SPLITS = 16
"""Parts of a context that the Triton kernel reads at once, and then merges."""

MAX_TABLE_BYTES = 256 * 1024
"""Page numbers of one call of the TPU kernel, which lie in scalar memory (1 MiB)."""


class Kernel(StrEnum):
    """What attends over pages when decoding; prefills use loops, over pages as they lie."""

    LOOPS = "loops"
    TRITON = "triton"
    MOSAIC = "mosaic"


def kernel_of(backend: str, head_size: int, dtype: npt.DTypeLike) -> Kernel:
    """The kernel for a backend, as JAX names it, and pages of this dtype: Triton's blocks are powers of two, a TPU copies rows of 128 numbers."""
    if backend == "gpu" and head_size >= 16 and head_size.bit_count() == 1:
        return Kernel.TRITON
    return Kernel.MOSAIC if backend == "tpu" and head_size % 128 == 0 and jnp.dtype(dtype) == jnp.bfloat16 else Kernel.LOOPS


def page_shape(kernel: Kernel, num_kv: int, head_size: int) -> tuple[int, int, int]:
    """Of one page of a pool."""
    return (PAGE, num_kv, head_size) if kernel == Kernel.LOOPS else (num_kv, PAGE, head_size)


def write_positions(pool: jax.Array, page_W: jax.Array, offset_W: jax.Array, x_WKH: jax.Array, kernel: Kernel) -> jax.Array:
    """The pool with these positions' keys or values, in place where it is donated."""
    x_WKH = x_WKH.astype(pool.dtype)
    return pool.at[page_W, offset_W].set(x_WKH) if kernel == Kernel.LOOPS else pool.at[page_W, :, offset_W].set(x_WKH)


def attend_lanes(q_RNH: jax.Array, pools: tuple[jax.Array, jax.Array], table_RP: jax.Array, position_R: jax.Array, *, kernel: Kernel) -> jax.Array:
    """One query per row attends to its row's keys up to its own position; out [R, N, H], float32.

    pools: of K and V, [pages, K, PAGE, H], finite, float32 or bfloat16, in which Triton's kernel takes products and gives its result. P is a multiple
    of BLOCK_PAGES. kernel: not loops. On a CPU the kernel is interpreted, Triton's by itself, the TPU's under
    `jax.experimental.pallas.tpu.force_tpu_interpret_mode`: for tests.
    """
    num_rows, num_heads, size = q_RNH.shape
    num_kv, num_pages = pools[0].shape[1], table_RP.shape[1]
    q = (q_RNH * size**-0.5).reshape(num_rows * num_kv, num_heads // num_kv, size)
    table = (table_RP[:, None, :] * num_kv + jnp.arange(num_kv)[:, None]).reshape(-1, num_pages)
    length = jnp.repeat(position_R + 1, num_kv)
    k, v = (pool.reshape(1, -1, PAGE, size) for pool in pools)
    out = _on_gpu(q, k, v, table, length) if kernel == Kernel.TRITON else _on_tpu(q, k, v, table, length)
    return out.astype(jnp.float32).reshape(q_RNH.shape)


def _on_gpu(q_RGH: jax.Array, k: jax.Array, v: jax.Array, table_RP: jax.Array, length_R: jax.Array) -> jax.Array:
    ops = import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    num_blocks = table_RP.shape[1] // BLOCK_PAGES
    settings = {"pages_per_compute_block": BLOCK_PAGES, "k_splits": math.gcd(num_blocks, MAX_SPLITS), "interpret": jax.default_backend() == "cpu"}
    with jax.default_matmul_precision("highest"):  # float32 products would be TF32's
        out: jax.Array = ops.paged_attention(q_RGH.astype(k.dtype), k, v, table_RP, length_R, **settings)
    return out


def _on_tpu(q_RGH: jax.Array, k: jax.Array, v: jax.Array, table_RP: jax.Array, length_R: jax.Array) -> jax.Array:
    ops = import_module("jax.experimental.pallas.ops.tpu.paged_attention")
    num_rows, num_pages = table_RP.shape
    step = max(1, MAX_TABLE_BYTES // (table_RP.dtype.itemsize * num_pages))
    parts = [slice(start, start + step) for start in range(0, num_rows, step)]
    return jnp.concatenate([ops.paged_attention(q_RGH[x], k, v, length_R[x], table_RP[x], pages_per_compute_block=BLOCK_PAGES) for x in parts])
