"""LoRA adapters in stacked slots: many runs' low-rank deltas on one resident base.

Shapes (legend of the whole package `model`):
    L layer   A adapter slot   R row of positions (a tile: all its positions belong to one run)   C position within a row
    D model   I in features    O out features   r rank of the class (smaller ranks are padded with zeros)

A delta is `scale * (x @ a) @ b`, computed in float32, with `LoraSpec.scale` applied at use and never folded in. Padding stays zero by
itself: where a's column and b's row are both zero, both gradients are zero, and so are the moments. The same holds for a module that a run
does not train: its a and b are zero.

Two modules lie above the layers: "head", the unembedding (tied to the embedding or not), a [1, D, r], b [1, r, V]; and "value", the value head of a
critic, a [1, D, r], b [1, r, 1], which has no base weight. Only runs that train them have them on the host. Resident slots have room for all runs
or for none, [1, A, ...], as the server is configured: what is not compiled in costs nothing.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from noria.config import LearnerConfig
from noria.model.config import ModelConfig
from noria.types import FloatArray, LoraSpec

ATTENTION_MODULES = ("q", "k", "v", "o")
MLP_MODULES = ("gate", "up", "down")
MODULES = ATTENTION_MODULES + MLP_MODULES
HEAD, VALUE = "head", "value"
TOP_MODULES = (HEAD, VALUE)
"""The unembedding and the value head: outside the layers, so their leaves have one "layer". Both read the last norm's output."""

ROOM_SETTINGS = {HEAD: "has_unembed", VALUE: "has_values"}
"""What of a server's [learner] gives each top module room in its slots."""

_TOP_NAMES = {HEAD: "an adapted unembedding", VALUE: "a value head"}

AdapterTree: TypeAlias = dict[str, dict[str, jax.Array]]
"""{"a": {module: [..., I, r]}, "b": {module: [..., r, O]}}; leading axes: [L, A] stacked slots, [L] one run, [A] one layer, [R] gathered;
those of top modules have 1 in place of L."""

HostAdapter: TypeAlias = dict[str, dict[str, FloatArray]]
"""One run's adapter on the host: {"a": {module: [L, I, r]}, "b": {module: [L, r, O]}}, r = the width of its rank class; top modules, if any,
have 1 in place of L."""


class AdapterState(NamedTuple):
    """All of one run's training state, on the host: parameters, AdamW moments, optimizer steps taken. What is committed, and loaded again."""

    params: HostAdapter
    first_moment: HostAdapter
    second_moment: HostAdapter
    num_steps: int


class Deltas(Protocol):
    """What adapts one layer's projections."""

    def add(self, modules: tuple[str, ...], x_RCI: jax.Array, ys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """For each of the modules whose input is x, all that are or one: its y [R, C, O] plus the rows' deltas, float32."""
        ...


INPUT_GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Modules that read the same input, in the order of MODULES."""


class RowAdapters(NamedTuple):
    """One layer's adapters gathered per row: a {module: [R, I, r]}, b {module: [R, r, O]}, scale_R."""

    a: Mapping[str, jax.Array]
    b: Mapping[str, jax.Array]
    scale_R: jax.Array

    def add(self, modules: tuple[str, ...], x_RCI: jax.Array, ys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """See `Deltas`."""
        return tuple(y + delta(x_RCI, self.a[module], self.b[module], self.scale_R) for module, y in zip(modules, ys, strict=True))


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


def top_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in features, out features) of the top modules."""
    return {HEAD: (config.hidden_size, config.vocab_size), VALUE: (config.hidden_size, 1)}


def adapter_shapes(config: ModelConfig, width: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Shapes of one layer's leaves in a rank class, without leading axes: a [I, r], b [r, O]. The one table of them."""
    return _factor_shapes(module_sizes(config), width)


def top_shapes(config: ModelConfig, width: int, tops: Collection[str] = TOP_MODULES) -> dict[str, dict[str, tuple[int, int]]]:
    """The same of the top modules named by `tops`."""
    return _factor_shapes({module: size for module, size in top_sizes(config).items() if module in tops}, width)


def _factor_shapes(sizes: Mapping[str, tuple[int, int]], width: int) -> dict[str, dict[str, tuple[int, int]]]:
    return {
        "a": {m: (size_in, width) for m, (size_in, _) in sizes.items()},
        "b": {m: (width, size_out) for m, (_, size_out) in sizes.items()},
    }


def host_shapes(config: ModelConfig, width: int, tops: Collection[str] = TOP_MODULES) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Shapes of a host adapter's leaves, those of the named top modules included: a [L, I, r], b [L, r, O]."""
    shapes, above = adapter_shapes(config, width), top_shapes(config, width, tops)
    return {
        side: {m: (config.num_layers, *shape) for m, shape in shapes[side].items()} | {m: (1, *shape) for m, shape in above[side].items()}
        for side in shapes
    }


def width_of(adapter: HostAdapter) -> int:
    """The rank axis of an adapter's leaves, the widest if they differ (see `misfit`), 0 without any."""
    return max((leaf.shape[-1] for leaf in adapter.get("a", {}).values() if leaf.ndim), default=0)


def misfit(adapter: HostAdapter, config: ModelConfig, width: int, tops: Collection[str] = ()) -> str | None:
    """Why an adapter of one run is not one of this model at this width (modules, shapes, dtype), None if it is.

    tops: top modules that it may have: those that there is room for.
    """
    shapes, found = host_shapes(config, width), {(side, module) for side, leaves in adapter.items() for module in leaves}
    if unknown := {(side, module) for side, module in found if module not in shapes.get(side, {})}:
        return f"the model has no {sorted(unknown)}"
    above = [module for module in TOP_MODULES if any(module == other for _, other in found)]
    for module in above:
        if module not in tops:
            return f"it has {_TOP_NAMES[module]} (module {module!r}), for which there is no room here: set learner.{ROOM_SETTINGS[module]} = true"
    for side in shapes:
        for module in (*MODULES, *above):
            leaf, expected = adapter.get(side, {}).get(module), shapes[side][module]
            if leaf is None or leaf.shape != expected or leaf.dtype != np.float32:
                got = "nothing" if leaf is None else f"{leaf.dtype} {leaf.shape}"
                return f"{side} of module {module!r} is {got}, expected float32 {expected}"
    return None


def trained_modules(spec: LoraSpec) -> tuple[str, ...]:
    """The modules that `spec` trains, in the order of MODULES, top modules last."""
    return ATTENTION_MODULES * spec.train_attn + MLP_MODULES * spec.train_mlp + trained_tops(spec)


def trained_tops(spec: LoraSpec) -> tuple[str, ...]:
    """The top modules that `spec` trains, and that the run's host adapters therefore have."""
    return (HEAD,) * spec.train_unembed + (VALUE,) * spec.train_value


def resident_tops(settings: LearnerConfig) -> tuple[str, ...]:
    """The top modules that the server's slots have room for."""
    return tuple(module for module in TOP_MODULES if getattr(settings, ROOM_SETTINGS[module]))


def initial_adapter(config: ModelConfig, spec: LoraSpec, width: int, seed: int) -> HostAdapter:
    """A fresh adapter: a uniform in ±1/sqrt(I) (Kaiming with a = sqrt(5), as PEFT does), b zero, so that the delta is zero, and every value.

    The bytes depend on the seed, the model's shape and the spec only. width: of the rank class, >= spec.rank.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    adapter, adapted = zero_adapter(config, width, trained_tops(spec)), trained_modules(spec)
    for module, (size_in, _) in (module_sizes(config) | top_sizes(config)).items():
        if module in adapted:
            bound, a = 1 / np.sqrt(size_in), adapter["a"][module]
            a[:, :, : spec.rank] = rng.uniform(-bound, bound, (len(a), size_in, spec.rank))
    return adapter


def zero_adapter(config: ModelConfig, width: int, tops: Collection[str] = ()) -> HostAdapter:
    """An adapter whose every leaf is zero, with the named top modules."""
    shapes = host_shapes(config, width, tops)
    return {side: {m: np.zeros(shape, np.float32) for m, shape in shapes[side].items()} for side in shapes}


def initial_state(config: ModelConfig, spec: LoraSpec, width: int, seed: int) -> AdapterState:
    """A new run's state: `initial_adapter`, moments zero, no steps."""
    return fresh_state(initial_adapter(config, spec, width, seed))


def fresh_state(params: HostAdapter) -> AdapterState:
    """The state of a run that starts from `params`: moments zero, no steps."""
    return AdapterState(params, jax.tree.map(np.zeros_like, params), jax.tree.map(np.zeros_like, params), 0)


def resize_rank(adapter: HostAdapter, rank: int) -> HostAdapter:
    """The adapter with its rank axis cut or zero-padded to `rank`; cutting is only for columns that are zero. Leaves of that rank are not copied."""

    def resize(leaf: FloatArray, axis: int) -> FloatArray:
        if rank == leaf.shape[axis]:
            return leaf
        if rank < leaf.shape[axis]:
            return np.ascontiguousarray(leaf.take(range(rank), axis=axis))
        pad = [(0, 0)] * leaf.ndim
        pad[axis] = (0, rank - leaf.shape[axis])
        return np.pad(leaf, pad)

    return {"a": {m: resize(leaf, 2) for m, leaf in adapter["a"].items()}, "b": {m: resize(leaf, 1) for m, leaf in adapter["b"].items()}}


def with_tops(adapter: HostAdapter, config: ModelConfig, width: int, tops: Collection[str]) -> HostAdapter:
    """The adapter with exactly these top modules: those that it lacks are zeros, others are left out."""
    shapes = host_shapes(config, width, tops)
    return {
        side: {m: adapter[side][m] if m in adapter[side] else np.zeros(shape, np.float32) for m, shape in shapes[side].items()} for side in shapes
    }


def empty_slots(config: ModelConfig, num_slots: int, width: int, tops: Collection[str] = ()) -> AdapterTree:
    """Stacked slots of zeros, leaves [L, A, ...] and [1, A, ...]: the learner's layout, whose layers are scanned."""
    shapes = host_shapes(config, width, tops)
    return {side: {m: jnp.zeros((first, num_slots, *rest), jnp.float32) for m, (first, *rest) in shapes[side].items()} for side in shapes}


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
    """uint32 checksum of one run's adapter in one layer (leaves a [I, r], b [r, O]) on the device. `checksum` is the sum over layers and the top
    modules, whose index is 0, modulo 2^32."""
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
        for m, module in enumerate((*MODULES, *TOP_MODULES)):
            if module in adapter[side]:
                yield side, module, (2 * m + s + 1) * _MIX[3]
