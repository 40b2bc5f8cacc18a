"""LoRA adapters in stacked slots: many runs' low-rank deltas on one resident base.

Shapes (legend of the whole package `model`):
    L layer   A adapter slot   R row of positions (a tile: all its positions belong to one run)   C position within a row
    D model   I in features    O out features   r rank of the class (smaller ranks are padded with zeros)

A delta is `scale * (x @ a) @ b`, computed in float32, with scale = alpha / rank applied at use and never folded in. Padding stays zero by
itself: where a's column and b's row are both zero, both gradients are zero, and so are the moments. The same holds for a module that a run
does not train: its a and b are zero.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from noria.model.config import ModelConfig
from noria.types import FloatArray, LoraSpec

ATTENTION_MODULES = ("q", "k", "v", "o")
MLP_MODULES = ("gate", "up", "down")
MODULES = ATTENTION_MODULES + MLP_MODULES

AdapterTree: TypeAlias = dict[str, dict[str, jax.Array]]
"""{"a": {module: [..., I, r]}, "b": {module: [..., r, O]}}; leading axes: [L, A] stacked slots, [L] one run, [A] one layer, [R] gathered."""

HostAdapter: TypeAlias = dict[str, dict[str, FloatArray]]
"""One run's adapter on the host: {"a": {module: [L, I, r]}, "b": {module: [L, r, O]}}, r = the rank class."""


class AdapterState(NamedTuple):
    """All of one run's training state, on the host: parameters, AdamW moments, optimizer steps taken. What is committed, and loaded again."""

    params: HostAdapter
    first_moment: HostAdapter
    second_moment: HostAdapter
    num_steps: int


class RowAdapters(NamedTuple):
    """One layer's adapters gathered per row: a {module: [R, I, r]}, b {module: [R, r, O]}, scale_R."""

    a: Mapping[str, jax.Array]
    b: Mapping[str, jax.Array]
    scale_R: jax.Array


def module_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in features, out features) of every module that can carry a delta."""
    model, heads, kv_heads = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = config.intermediate_size
    return {
        "q": (model, heads),
        "k": (model, kv_heads),
        "v": (model, kv_heads),
        "o": (heads, model),
        "gate": (model, mlp),
        "up": (model, mlp),
        "down": (mlp, model),
    }


def trained_modules(spec: LoraSpec) -> tuple[str, ...]:
    """The modules that `spec` adapts, in the order of MODULES."""
    return ATTENTION_MODULES * spec.train_attn + MLP_MODULES * spec.train_mlp


def initial_adapter(config: ModelConfig, spec: LoraSpec, max_rank: int, seed: int) -> HostAdapter:
    """A fresh adapter: a uniform in ±1/sqrt(I) (Kaiming with a = sqrt(5), as PEFT does), b zero, so that the delta is zero.

    The bytes depend on the seed, the model's shape and the spec only. max_rank: the rank class, >= spec.rank.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    adapted = trained_modules(spec)
    a, b = {}, {}
    for module, (size_in, size_out) in module_sizes(config).items():
        a[module] = np.zeros((config.num_layers, size_in, max_rank), np.float32)
        b[module] = np.zeros((config.num_layers, max_rank, size_out), np.float32)
        if module in adapted:
            bound = 1 / np.sqrt(size_in)
            a[module][:, :, : spec.rank] = rng.uniform(-bound, bound, (config.num_layers, size_in, spec.rank))
    return {"a": a, "b": b}


def initial_state(config: ModelConfig, spec: LoraSpec, max_rank: int, seed: int) -> AdapterState:
    """A new run's state: `initial_adapter`, moments zero, no steps."""
    params = initial_adapter(config, spec, max_rank, seed)
    return AdapterState(params, jax.tree.map(np.zeros_like, params), jax.tree.map(np.zeros_like, params), 0)


def resize_rank(adapter: HostAdapter, rank: int) -> HostAdapter:
    """The adapter with its rank axis cut or zero-padded to `rank`; cutting is only for columns that are zero."""

    def resize(leaf: FloatArray, axis: int) -> FloatArray:
        if rank <= leaf.shape[axis]:
            return np.ascontiguousarray(leaf.take(range(rank), axis=axis))
        pad = [(0, 0)] * leaf.ndim
        pad[axis] = (0, rank - leaf.shape[axis])
        return np.pad(leaf, pad)

    return {"a": {m: resize(leaf, 2) for m, leaf in adapter["a"].items()}, "b": {m: resize(leaf, 1) for m, leaf in adapter["b"].items()}}


def empty_slots(config: ModelConfig, num_slots: int, max_rank: int) -> AdapterTree:
    """Stacked slots [L, A, ...] of zeros."""
    layers = config.num_layers
    sizes = module_sizes(config)
    return {
        "a": {m: jnp.zeros((layers, num_slots, size_in, max_rank), jnp.float32) for m, (size_in, _) in sizes.items()},
        "b": {m: jnp.zeros((layers, num_slots, max_rank, size_out), jnp.float32) for m, (_, size_out) in sizes.items()},
    }


def gather_rows(layer: AdapterTree, scale_A: jax.Array, slot_R: jax.Array) -> RowAdapters:
    """Each row's adapter of one layer (leaves [A, ...]): done inside the layer, so that copies never exist for all layers at once."""
    pick = {side: {m: leaf[slot_R] for m, leaf in layer[side].items()} for side in ("a", "b")}
    return RowAdapters(pick["a"], pick["b"], scale_A[slot_R])


def delta(x_RCI: jax.Array, a_RIr: jax.Array, b_RrO: jax.Array, scale_R: jax.Array) -> jax.Array:
    """scale * (x a) b per row, [R, C, O] in float32. Rows never mix, so neither do runs."""
    precision = jax.lax.Precision.HIGHEST
    h_RCr = jnp.einsum("rci,rik->rck", x_RCI.astype(jnp.float32), a_RIr, precision=precision)
    return jnp.einsum("rck,rko->rco", h_RCr * scale_R[:, None, None], b_RrO, precision=precision)


_MIX = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
"""Odd 32-bit multipliers (from xxHash) that give every coordinate its own weight in a checksum."""


def layer_checksum(layer: Mapping[str, Mapping[str, jax.Array]], index: jax.Array | int) -> jax.Array:
    """uint32 checksum of one run's adapter in one layer (leaves a [I, r], b [r, O]); a run's checksum is the sum over layers, modulo 2^32.

    Every bit counts, with a weight that depends on side, module, layer and coordinates, so that swapped parts are seen. Zeros weigh nothing:
    the checksum is the same in every rank class.
    """
    total = jnp.uint32(0)
    for s, side in enumerate(("a", "b")):
        for m, module in enumerate(MODULES):
            leaf = layer[side][module]
            bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
            row = jnp.arange(leaf.shape[0], dtype=jnp.uint32)[:, None] * jnp.uint32(_MIX[0])
            column = jnp.arange(leaf.shape[1], dtype=jnp.uint32)[None, :] * jnp.uint32(_MIX[1])
            place = jnp.asarray(index).astype(jnp.uint32) * jnp.uint32(_MIX[2]) + jnp.uint32(((2 * m + s + 1) * _MIX[3]) % 2**32)
            total += jnp.sum(bits * ((row + column + place) | jnp.uint32(1)), dtype=jnp.uint32)
    return total


@jax.jit
def checksum(adapter: AdapterTree) -> jax.Array:
    """uint32 checksum of one run's adapter with leaves [L, ...] (see `layer_checksum`)."""
    num_layers = adapter["a"]["q"].shape[0]
    per_layer = jax.vmap(layer_checksum)(adapter, jnp.arange(num_layers))
    return jnp.sum(per_layer, dtype=jnp.uint32)
