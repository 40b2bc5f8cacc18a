"""LoRA adapters in stacked slots: many runs' low-rank deltas on one resident base.

Shapes (legend of the whole package `model`):
    L layer   A adapter slot   R row of positions (a tile: all its positions belong to one run)   C position within a row
    D model   I in features    O out features   r rank of the class (smaller ranks are padded with zeros)

A delta is `scale * (x @ a) @ b`, computed in float32, with `LoraSpec.scale` applied at use and never folded in. Padding stays zero by
itself: where a's column and b's row are both zero, both gradients are zero, and so are the moments. The same holds for a module that a run
does not train: its a and b are zero.

An adapter on the host may also carry the unembedding, module "head": a [1, D, r], b [1, r, V]. It is read, exported, merged and stored; the
resident slots have no room for it (`misfit`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from noria.model.config import ModelConfig
from noria.types import FloatArray, LoraSpec

ATTENTION_MODULES = ("q", "k", "v", "o")
MLP_MODULES = ("gate", "up", "down")
MODULES = ATTENTION_MODULES + MLP_MODULES
HEAD = "head"
"""The unembedding, as a module: outside the layers, so its leaves have one "layer"."""

AdapterTree: TypeAlias = dict[str, dict[str, jax.Array]]
"""{"a": {module: [..., I, r]}, "b": {module: [..., r, O]}}; leading axes: [L, A] stacked slots, [L] one run, [A] one layer, [R] gathered."""

HostAdapter: TypeAlias = dict[str, dict[str, FloatArray]]
"""One run's adapter on the host: {"a": {module: [L, I, r]}, "b": {module: [L, r, O]}}, r = the rank class; "head", if any, has 1 in place of L."""


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


def adapter_shapes(config: ModelConfig, max_rank: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Shapes of one layer's leaves in a rank class, without leading axes: a [I, r], b [r, O]. The one table of them."""
    sizes = module_sizes(config)
    return {
        "a": {m: (size_in, max_rank) for m, (size_in, _) in sizes.items()},
        "b": {m: (max_rank, size_out) for m, (_, size_out) in sizes.items()},
    }


def host_shapes(config: ModelConfig, rank: int) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Shapes of a host adapter's leaves, those of the unembedding included: a [L, I, r], b [L, r, O]."""
    head = {"a": (1, config.hidden_size, rank), "b": (1, rank, config.vocab_size)}
    shapes = adapter_shapes(config, rank)
    return {side: {m: (config.num_layers, *shape) for m, shape in shapes[side].items()} | {HEAD: head[side]} for side in shapes}


def misfit(adapter: HostAdapter, config: ModelConfig, max_rank: int, *, with_head: bool = False) -> str | None:
    """Why an adapter of one run is not one of this model in this rank class (modules, shapes, dtype), None if it is.

    with_head: it may adapt the unembedding, which the resident slots cannot.
    """
    shapes, found = host_shapes(config, max_rank), {(side, module) for side, leaves in adapter.items() for module in leaves}
    if unknown := {(side, module) for side, module in found if module not in shapes.get(side, {})}:
        return f"the model has no {sorted(unknown)}"
    has_head = any(module == HEAD for _, module in found)
    if has_head and not with_head:
        return f"it adapts the unembedding (module {HEAD!r}), which learner and sampler have no room for"
    for side in shapes:
        for module in MODULES + (HEAD,) * has_head:
            leaf, expected = adapter.get(side, {}).get(module), shapes[side][module]
            if leaf is None or leaf.shape != expected or leaf.dtype != np.float32:
                got = "nothing" if leaf is None else f"{leaf.dtype} {leaf.shape}"
                return f"{side} of module {module!r} is {got}, expected float32 {expected}"
    return None


def trained_modules(spec: LoraSpec) -> tuple[str, ...]:
    """The modules that `spec` adapts, in the order of MODULES."""
    return ATTENTION_MODULES * spec.train_attn + MLP_MODULES * spec.train_mlp


def initial_adapter(config: ModelConfig, spec: LoraSpec, max_rank: int, seed: int) -> HostAdapter:
    """A fresh adapter: a uniform in ±1/sqrt(I) (Kaiming with a = sqrt(5), as PEFT does), b zero, so that the delta is zero.

    The bytes depend on the seed, the model's shape and the spec only. max_rank: the rank class, >= spec.rank.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    adapter, adapted = zero_adapter(config, max_rank), trained_modules(spec)
    for module, (size_in, _) in module_sizes(config).items():
        if module in adapted:
            bound = 1 / np.sqrt(size_in)
            adapter["a"][module][:, :, : spec.rank] = rng.uniform(-bound, bound, (config.num_layers, size_in, spec.rank))
    return adapter


def zero_adapter(config: ModelConfig, max_rank: int) -> HostAdapter:
    """An adapter whose every leaf is zero."""
    shapes = adapter_shapes(config, max_rank)
    return {side: {m: np.zeros((config.num_layers, *shape), np.float32) for m, shape in shapes[side].items()} for side in shapes}


def initial_state(config: ModelConfig, spec: LoraSpec, max_rank: int, seed: int) -> AdapterState:
    """A new run's state: `initial_adapter`, moments zero, no steps."""
    return fresh_state(initial_adapter(config, spec, max_rank, seed))


def fresh_state(params: HostAdapter) -> AdapterState:
    """The state of a run that starts from `params`: moments zero, no steps."""
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
    """Stacked slots of zeros, leaves [L, A, ...]: the learner's layout, whose layers are scanned."""
    return _zeros((config.num_layers, num_slots), config, max_rank)


def empty_layer_slots(config: ModelConfig, num_slots: int, max_rank: int) -> tuple[AdapterTree, ...]:
    """The same layer by layer, leaves [A, ...]: the sampler's layout, whose layers are a list."""
    return tuple(_zeros((num_slots,), config, max_rank) for _ in range(config.num_layers))


def _zeros(leading: tuple[int, ...], config: ModelConfig, max_rank: int) -> AdapterTree:
    shapes = adapter_shapes(config, max_rank)
    return {side: {m: jnp.zeros((*leading, *shape), jnp.float32) for m, shape in shapes[side].items()} for side in shapes}


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


def layer_checksum(layer: Mapping[str, Mapping[str, jax.Array]], index: int) -> jax.Array:
    """uint32 checksum of one run's adapter in one layer (leaves a [I, r], b [r, O]) on the device; `checksum` is the sum over layers modulo 2^32."""
    total = jnp.uint32(0)
    for side, module, salt in _leaf_salts(layer):
        leaf = layer[side][module]
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        row = jnp.arange(leaf.shape[0], dtype=jnp.uint32)[:, None] * jnp.uint32(_MIX[0])
        column = jnp.arange(leaf.shape[1], dtype=jnp.uint32)[None, :] * jnp.uint32(_MIX[1])
        place = jnp.uint32((index * _MIX[2] + salt) % 2**32)
        total += jnp.sum(bits * ((row + column + place) | jnp.uint32(1)), dtype=jnp.uint32)
    return total


def checksum(adapter: HostAdapter) -> int:
    """Checksum, 0 <= it < 2^32, of one run's adapter on the host, equal to the sum of `layer_checksum` over its layers on the device.

    Every bit counts, with a weight that depends on side, module, layer and coordinates, so that swapped parts are seen. Zeros weigh nothing:
    the checksum is the same in every rank class. NumPy, since it runs beside the device thread and must neither compile nor wait for it.
    """
    total = 0
    for side, module, salt in _leaf_salts(adapter):
        leaf = adapter[side][module]
        num_layers, num_rows, num_columns = leaf.shape
        bits = np.ascontiguousarray(leaf, np.float32).view(np.uint32).reshape(num_layers, -1)
        row = np.arange(num_rows, dtype=np.uint32)[:, None] * np.uint32(_MIX[0])
        column = np.arange(num_columns, dtype=np.uint32)[None, :] * np.uint32(_MIX[1])
        place = (row + column).ravel()
        for index in range(num_layers):
            weight = (place + np.uint32((index * _MIX[2] + salt) % 2**32)) | np.uint32(1)
            total += int(np.dot(bits[index], weight))
    return total % 2**32


def _leaf_salts(adapter: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, int]]:
    """(side, module, what sets the leaf's weights apart from every other leaf's) of the modules that `adapter` has."""
    for s, side in enumerate(("a", "b")):
        for m, module in enumerate((*MODULES, HEAD)):
            if module in adapter[side]:
                yield side, module, (2 * m + s + 1) * _MIX[3]
