"""The machine's ceiling for a base model: its matrix products alone, at one width and in the base's own dtype, in the same run as what is measured.

Timings on shared machines are noisy: a measurement and its ceiling alternate, and what is reported is the median of their ratios. At few rows the
ceiling's own dispatches and reductions weigh as much as its products, so that a fraction may pass 1 there.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from noria.model.config import ModelConfig
from noria.model.placement import BaseParams
from noria.model.transformer import head_product, precision_of

REPEATS = 5


@dataclass(frozen=True, slots=True)
class Ratio:
    """seconds: median of the measured work. ceiling_s: median of the ceiling. fraction: median over pairs of ceiling / measured, 1 is the limit."""

    seconds: float
    ceiling_s: float
    fraction: float


def layer_matmuls(base: BaseParams, num_rows: int) -> Callable[[], None]:
    """All layers' matrix products on `num_rows` rows and nothing else, compiled and ready to call. As in the model: products of the weights' dtype,
    sums of float32."""

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.matmul(x.astype(weight.dtype), weight, preferred_element_type=jnp.float32, precision=precision_of(weight))

    @jax.jit
    def run(x: jax.Array, wide: jax.Array, layers: tuple[dict[str, jax.Array], ...]) -> jax.Array:
        for weights in layers:
            for name in ("q", "k", "v", "gate", "up"):
                # A product's sum is read, so that none is optimized away; its effect on x is nothing.
                x = x + 0 * jnp.sum(product(x, weights[name]))
            x = x + 0 * jnp.sum(product(x, weights["o"])) + 0 * product(wide, weights["down"])
        return x

    size, wide_size = base.layers[0]["q"].shape[0], base.layers[0]["down"].shape[0]
    x, wide = jnp.ones((num_rows, size), jnp.float32), jnp.ones((num_rows, wide_size), jnp.float32)

    def once() -> None:
        run(x, wide, base.layers).block_until_ready()

    once()
    return once


def head_matmul(base: BaseParams, config: ModelConfig, num_rows: int) -> Callable[[], None]:
    """The head's product on `num_rows` rows, compiled and ready to call."""
    params = {name: array for name, array in base.stacked.items() if name != "layers"}
    run = jax.jit(head_product)
    h = jnp.ones((num_rows, config.hidden_size), jnp.float32)

    def once() -> None:
        run(params, h).block_until_ready()

    once()
    return once


def compare(work: Callable[[], None], ceiling: Callable[[], None], ceiling_times: float = 1.0) -> Ratio:
    """Alternate the two, both compiled. ceiling_times: how many ceilings the work is made of (3 forward passes' products, say)."""
    pairs = []
    for _ in range(REPEATS):
        pairs.append((_seconds(work), _seconds(ceiling) * ceiling_times))
    return Ratio(statistics.median(s for s, _ in pairs), statistics.median(c for _, c in pairs), statistics.median(c / s for s, c in pairs))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
