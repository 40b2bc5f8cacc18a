"""Whether this device's kernel over pages gives what our own loops give: a part of `gpu_check`, and the test of a machine with an accelerator."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noria.bench.harness import Result, alternate
from noria.sampler.page_kernels import Kernel, kernel_of
from noria.sampler.paged_attention import attend_rows
from noria.sampler.pages import PAGE
from noria.sampler.sequence import LANES_PER_TILE

REPEATS = 5


def compare(heads: tuple[int, int, int], dtype: np.dtype[Any], *, num_lanes: int, num_pages: int) -> Result:
    """Lanes of up to num_pages pages each, one query each: the largest difference, relative to the largest output, and loops' time over the kernel's.

    heads: N, K, H. num_lanes: a multiple of LANES_PER_TILE. num_pages: of BLOCK_PAGES. Only "kernel" where the device has none but loops.
    """
    num_heads, num_kv, size = heads
    kernel = kernel_of(jax.default_backend(), size, dtype)
    if kernel == Kernel.LOOPS:
        return {"kernel": str(kernel)}
    rng = np.random.default_rng(0)
    pool = num_lanes * num_pages + 1, PAGE, num_kv, size
    k, v = (jnp.asarray(rng.normal(size=pool).astype(np.float32)).astype(dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(num_lanes, 1, num_heads, size)).astype(np.float32))
    table = jnp.asarray(1 + rng.permutation(num_lanes * num_pages).reshape(num_lanes, num_pages).astype(np.int32))
    position = jnp.asarray(rng.integers(0, num_pages * PAGE, (num_lanes, 1)).astype(np.int32))
    pools = {Kernel.LOOPS: (k, v), kernel: (k.swapaxes(1, 2), v.swapaxes(1, 2))}
    attend = {each: jax.jit(partial(attend_rows, rows_per_group=LANES_PER_TILE, kernel=each)) for each in pools}
    outs = {each: np.asarray(attend[each](q, *pools[each], table, position)) for each in pools}
    works = {str(each): lambda each=each: jax.block_until_ready(attend[each](q, *pools[each], table, position)) for each in pools}
    difference = np.abs(outs[kernel] - outs[Kernel.LOOPS]).max() / np.abs(outs[Kernel.LOOPS]).max()
    return {"kernel": str(kernel), "difference": float(difference), "speedup": alternate(works, repeats=REPEATS).ratio(Kernel.LOOPS, kernel)}
