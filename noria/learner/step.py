"""The learner's two phases on one packed microbatch: score (forward) and pull (backward). All jitted functions of training live here.

    score   ids, adapters -> per-entry outputs, and residuals: each layer's input and attention's (out, lse), nothing else
    (a loss turns outputs into cotangents: rl/losses.py)
    pull    residuals, cotangents -> adds every tile's gradient to its slot's accumulator

The pull is our own reverse scan over layers: it recomputes what score did not keep, and its carry holds the accumulators, which are therefore
updated in place. The gradient is taken with respect to the adapters *gathered per tile* and then added tile by tile, in the order of the tiles:
a slot's sum depends on its own run's order only, whatever its neighbours (design section 6).

A microbatch may be a chunk of a tree too long for one pass (learner/replay.py): then it also reads the keys and values of the path before it, hands
its own out, and its pull adds what it owes the path to the path's gradient. Without a path nothing of that exists in the program.

What the layers do beside attention they do block by block, P tiles at once, for the blocks that hold a piece: on CPU a pass costs what it holds, and
one length of axis serves all.

    L layer   A adapter slot   G block of P tiles   R tile (row of C = 64 positions)   T = R * C position   M entry   D model   N, K, H heads
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from noria.learner.head import EntryArrays, Top, head_outputs, head_pull, layer_modules, top_modules, with_top
from noria.model.attention import Pairs, Path, PathGradient, PathLayer, attend_backward, attend_forward, path_backward
from noria.model.config import ModelConfig
from noria.model.lora import MLP_MODULES, AdapterTree, RowAdapters, gather_rows
from noria.model.transformer import Angles, Weights, after_attention, before_attention, embed, rotary_angles
from noria.rl.losses import LossInputs, LossMetrics, LossTable, TokenCotangents, TokenOutputs, cotangents, loss_inputs_of
from noria.rl.packing import ENTRY_CHUNK
from noria.types import TILE, Microbatch


class Model(NamedTuple):
    """What a pass reads: stacked base weights, the slots' adapters (leaves [L, A, ...]; top modules [1, A, ...], if any), their scales."""

    params: Mapping[str, Any]
    slots: AdapterTree
    scale_A: jax.Array


class Arrays(NamedTuple):
    """A microbatch on the device. ids_RC, depth_RC; end_T; slot_GP; num_blocks: int32 scalar, traced, the blocks that hold a piece."""

    ids_RC: jax.Array
    depth_RC: jax.Array
    end_T: jax.Array
    slot_GP: jax.Array
    num_blocks: jax.Array
    pairs: Pairs
    entries: EntryArrays


class Residuals(NamedTuple):
    """What score keeps for pull: x_LRCD layer inputs, out_LTNH and lse_LTN of attention, h_TD the last layer's output."""

    x_LRCD: jax.Array
    out_LTNH: jax.Array
    lse_LTN: jax.Array
    h_TD: jax.Array


KeysValues: TypeAlias = tuple[jax.Array, jax.Array]
"""Keys and values of a chunk, [L, T, K, H] each."""


def to_device(microbatch: Microbatch, tiles_at_once: int | None = None) -> Arrays:
    """The microbatch's arrays as the jitted functions take them.

    tiles_at_once: P, which divides the axis. None: one tile on CPU, where a loop costs nothing, keeps to the caches, and leaves out the axis's empty
    end; the whole axis on an accelerator, whose kernels want all rows.
    """
    entries = microbatch.entries
    assert len(entries) % ENTRY_CHUNK == 0, "entry axes are multiples of the head's chunk"
    num_tiles = len(microbatch.slot_tile_B)
    tiles = tiles_at_once or (1 if counts_tiles() else num_tiles)
    used = sum(placed.num_tiles for placed in microbatch.placed)
    return Arrays(
        ids_RC=jnp.asarray(microbatch.ids_T.reshape(-1, TILE)),
        depth_RC=jnp.asarray(microbatch.depth_T.reshape(-1, TILE)),
        end_T=jnp.asarray(microbatch.end_T),
        slot_GP=jnp.asarray(microbatch.slot_tile_B.reshape(-1, tiles)),
        num_blocks=jnp.int32(-(-used // tiles)),
        pairs=Pairs(jnp.asarray(microbatch.pair_query_X), jnp.asarray(microbatch.pair_key_X), jnp.int32(microbatch.num_pairs)),
        entries=EntryArrays(
            predict_from_M=jnp.asarray(entries.predict_from_M),
            target_M=jnp.asarray(entries.target_M),
            temperature_M=jnp.asarray(entries.temperature_M),
            slot_E=jnp.asarray(microbatch.slot_entry_tile_E),
            num_chunks=jnp.int32(-(-microbatch.num_entries // ENTRY_CHUNK)),
        ),
    )


def without_entries(arrays: Arrays) -> Arrays:
    """The same positions, without a pass of the head."""
    return arrays._replace(entries=arrays.entries._replace(num_chunks=jnp.int32(0)))


def counts_tiles() -> bool:
    """Whether passes here compute only the tiles that hold a piece (`MicrobatchShape.is_counted`)."""
    return jax.default_backend() == "cpu"


def loss_inputs(microbatch: Microbatch) -> LossInputs:
    """What the loss reads of the microbatch's entries, on the device."""
    return jax.tree.map(jnp.asarray, loss_inputs_of(microbatch.entries, microbatch.slot_M))


@partial(jax.jit, static_argnames=("config",))
def score(model: Model, arrays: Arrays, config: ModelConfig) -> tuple[TokenOutputs, Residuals]:
    """Forward pass of a microbatch. Static: config."""
    outputs, residuals, _ = _forward(model, arrays, None, config)
    return outputs, residuals


def reference(model: Model, arrays: Arrays, config: ModelConfig) -> jax.Array:
    """reference_logprobs_M: of the base, every adapter off. The program of `score` with all scales 0, so none of its own."""
    outputs, _ = score(without_adapters(model), arrays, config)
    return outputs.learner_logprobs_M


def without_adapters(model: Model) -> Model:
    """The model whose every delta has scale 0, as the reference policy is."""
    return model._replace(scale_A=jnp.zeros_like(model.scale_A))


@partial(jax.jit, static_argnames=("config",))
def score_chunk(model: Model, arrays: Arrays, path: Path, config: ModelConfig) -> tuple[TokenOutputs, Residuals, KeysValues]:
    """Forward pass of a chunk after `path`, with the chunk's own keys and values."""
    outputs, residuals, keys_values = _forward(model, arrays, path, config)
    assert keys_values is not None
    return outputs, residuals, keys_values


def _forward(model: Model, arrays: Arrays, path: Path | None, config: ModelConfig) -> tuple[TokenOutputs, Residuals, KeysValues | None]:
    params = model.params

    def layer(x_RCD: jax.Array, scanned: tuple[jax.Array, Weights, AdapterTree]) -> tuple[jax.Array, Any]:
        index, weights, slots = scanned
        q, k, v = _queries_keys_values(model, arrays, x_RCD, (weights, slots), config)
        out, lse = attend_forward(q, k, v, arrays.pairs, arrays.end_T, before=None if path is None else PathLayer(path, index))
        out_RCNH = _rows(out)

        def after(g: jax.Array, y_RCD: jax.Array) -> jax.Array:
            adapters = _adapters(model, arrays, slots, g)
            return _put(y_RCD, g, after_attention(weights, adapters, _take(x_RCD, g, arrays), _take(out_RCNH, g, arrays), config))

        return _each_block(arrays, after, x_RCD), ((x_RCD, out, lse), None if path is None else (k, v))

    scanned = (jnp.arange(config.num_layers), params["layers"], layer_modules(model.slots))
    x_RCD, ((x_LRCD, out_LTNH, lse_LTN), keys_values) = jax.lax.scan(layer, embed(params, arrays.ids_RC), scanned)
    h_TD = _flat(x_RCD)
    return head_outputs(_top(model), h_TD, arrays.entries, config), Residuals(x_LRCD, out_LTNH, lse_LTN, h_TD), keys_values


def _queries_keys_values(
    model: Model, arrays: Arrays, x_RCD: jax.Array, layer: tuple[Weights, AdapterTree], config: ModelConfig
) -> tuple[jax.Array, ...]:
    """q, k, v of a layer, [T, heads, H] each: zeros beyond the last block that holds a piece."""
    weights, slots = layer

    def before(g: jax.Array, qkv: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        parts = before_attention(weights, _adapters(model, arrays, slots, g), _take(x_RCD, g, arrays), _angles(arrays, g, config), config)
        return tuple(_put(whole, g, part) for whole, part in zip(qkv, parts, strict=True))

    sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    start = tuple(jnp.zeros((*x_RCD.shape[:2], heads, config.head_dim)) for heads in sizes)
    return tuple(_flat(whole) for whole in _each_block(arrays, before, start))


def _top(model: Model) -> Top:
    return Top(model.params, top_modules(model.slots), model.scale_A)


@jax.jit
def loss_cotangents(outputs: TokenOutputs, inputs: LossInputs, table: LossTable) -> tuple[TokenCotangents, LossMetrics]:
    """Cotangents of a scored microbatch's outputs and the sums of its metrics per slot (`rl.losses.cotangents`); nothing is static."""
    return cotangents(outputs, inputs, table)


@partial(jax.jit, static_argnames=("config",), donate_argnames=("accumulators",))
def pull(
    model: Model, arrays: Arrays, residuals: Residuals, cotangents: TokenCotangents, accumulators: AdapterTree, *, config: ModelConfig
) -> AdapterTree:
    """Add the gradient of the outputs' inner product with their cotangents to the accumulators (leaves as the slots', donated) and return them."""
    accumulators, _ = _backward(model, arrays, residuals, cotangents, (accumulators, None), path=None, config=config)
    return accumulators


@partial(jax.jit, static_argnames=("config",), donate_argnames=("accumulators", "path_gradient"))
def pull_chunk(
    model: Model,
    arrays: Arrays,
    residuals: Residuals,
    cotangents: TokenCotangents,
    accumulators: AdapterTree,
    *,
    path: Path,
    path_gradient: PathGradient,
    config: ModelConfig,
) -> tuple[AdapterTree, PathGradient]:
    """As `pull`, for a chunk after `path`. path_gradient (donated) holds at the chunk's own blocks, those after the path's, what its descendants owe
    its keys and values, if it was entered (`extend_path`); returned with what this chunk owes the path's blocks."""
    accumulators, gradient = _backward(model, arrays, residuals, cotangents, (accumulators, path_gradient), path=path, config=config)
    assert gradient is not None
    return accumulators, gradient


def _backward(
    model: Model,
    arrays: Arrays,
    residuals: Residuals,
    cotangents: TokenCotangents,
    sums: tuple[AdapterTree, PathGradient | None],
    *,
    path: Path | None,
    config: ModelConfig,
) -> tuple[AdapterTree, PathGradient | None]:
    """The reverse scan over layers. Its carry holds what is accumulated, so that it is updated in place: as inputs and outputs of a scan, or by a
    plain vjp over the path's keys and values, a second copy would live."""
    accumulators, path_gradient = sums
    d_h_TD, top_sums = head_pull(_top(model), residuals.h_TD, arrays.entries, cotangents, top_modules(accumulators), config=config)

    def layer(carry: Any, scanned: tuple[jax.Array, Weights, AdapterTree, jax.Array, jax.Array, jax.Array]) -> tuple[Any, None]:
        d_y, totals, path_sums = carry
        index, weights, slots, x_RCD, out, lse = scanned
        layer_pull = _LayerPull(model, arrays, (index, weights, slots), x_RCD, config)
        d_x, d_out, totals = layer_pull.after(_rows(out), d_y, totals)
        q, k, v = _queries_keys_values(model, arrays, x_RCD, (weights, slots), config)
        d_qkv = attend_backward((q, k, v, arrays.pairs, arrays.end_T), out, lse, _flat(d_out), None)
        if path is not None and path_sums is not None:
            d_qkv, path_sums = _path_pull(q, d_qkv, (out, lse), _flat(d_out), before=PathLayer(path, index), sums=path_sums)
        d_x, totals = layer_pull.before(tuple(_rows(part) for part in d_qkv), d_x, totals)
        return (d_x, totals, path_sums), None

    scanned = (
        jnp.arange(config.num_layers),
        model.params["layers"],
        layer_modules(model.slots),
        residuals.x_LRCD,
        residuals.out_LTNH,
        residuals.lse_LTN,
    )
    start = (_rows(d_h_TD), layer_modules(accumulators), path_gradient)
    (_, totals, path_gradient), _ = jax.lax.scan(layer, start, scanned, reverse=True)
    return with_top(totals, top_sums), path_gradient


class _LayerPull(NamedTuple):
    """The two parts of a layer's backward pass, before and after attention's own, block by block. layer: its index, weights, and slots."""

    model: Model
    arrays: Arrays
    layer: tuple[jax.Array, Weights, AdapterTree]
    x_RCD: jax.Array
    config: ModelConfig

    def after(self, out_RCNH: jax.Array, d_y_RCD: jax.Array, totals: AdapterTree) -> tuple[jax.Array, jax.Array, AdapterTree]:
        """Cotangents of the layer's input as far as it goes round attention, and of attention's output; the adapters' gradient added to totals."""
        index, weights, slots = self.layer

        def visit(g: jax.Array, carry: tuple[jax.Array, jax.Array, AdapterTree]) -> tuple[jax.Array, jax.Array, AdapterTree]:
            d_x, d_out, totals = carry
            adapters = _adapters(self.model, self.arrays, slots, g)

            def after(x: jax.Array, out: jax.Array, a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> jax.Array:
                return after_attention(weights, RowAdapters(a, b, adapters.scale_R), x, out, self.config)

            _, pull = jax.vjp(after, _take(self.x_RCD, g, self.arrays), _take(out_RCNH, g, self.arrays), adapters.a, adapters.b)
            d_x_block, d_out_block, d_a, d_b = pull(_take(d_x, g, self.arrays))
            totals = _add_rows(totals, index, self.arrays.slot_GP[g], ("o", *MLP_MODULES), (d_a, d_b))
            return _put(d_x, g, d_x_block), _put(d_out, g, d_out_block), totals

        return _each_block(self.arrays, visit, (d_y_RCD, jnp.zeros_like(out_RCNH), totals))

    def before(self, d_qkv: tuple[jax.Array, ...], d_x_RCD: jax.Array, totals: AdapterTree) -> tuple[jax.Array, AdapterTree]:
        """The whole cotangent of the layer's input, from what `after` made of it; the adapters' gradient added to totals."""
        index, weights, slots = self.layer

        def visit(g: jax.Array, carry: tuple[jax.Array, AdapterTree]) -> tuple[jax.Array, AdapterTree]:
            d_x, totals = carry
            adapters = _adapters(self.model, self.arrays, slots, g)

            def before(x: jax.Array, a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
                return before_attention(weights, RowAdapters(a, b, adapters.scale_R), x, _angles(self.arrays, g, self.config), self.config)

            _, pull = jax.vjp(before, _take(self.x_RCD, g, self.arrays), adapters.a, adapters.b)
            d_x_block, d_a, d_b = pull(tuple(_take(part, g, self.arrays) for part in d_qkv))
            totals = _add_rows(totals, index, self.arrays.slot_GP[g], ("q", "k", "v"), (d_a, d_b))
            return _put(d_x, g, _take(d_x, g, self.arrays) + d_x_block), totals

        return _each_block(self.arrays, visit, (d_x_RCD, totals))


def _path_pull(
    q: jax.Array,
    d_qkv: tuple[jax.Array, jax.Array, jax.Array],
    outputs: tuple[jax.Array, jax.Array],
    d_out: jax.Array,
    *,
    before: PathLayer,
    sums: PathGradient,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], PathGradient]:
    """A chunk's exchange with its path in one layer: it reads what its descendants left at its own blocks, and leaves what it owes the path's."""
    d_q, d_k, d_v = d_qkv
    d_q_path, sums = path_backward(q, before, outputs, d_out, sums)
    own_k, own_v = (_own(each, sums, before, d_k.shape[0]) for each in sums[:2])
    return (d_q + d_q_path, d_k + own_k, d_v + own_v), sums


def _own(sums_LSKCH: jax.Array, sums: PathGradient, before: PathLayer, length: int) -> jax.Array:
    """The gradient at the chunk's own blocks as [T, K, H]. Read, and not replaced by zeros at once: XLA would copy the whole buffer to do both."""
    where = (before.layer, before.path.num_blocks - sums.num_constant, 0, 0, 0)
    own = jax.lax.dynamic_slice(sums_LSKCH, where, (1, length // TILE, *sums_LSKCH.shape[2:]))[0]
    is_owed = (jnp.arange(length // TILE) < sums.num_owed)[:, None, None, None]
    return jnp.where(is_owed, own, 0.0).swapaxes(1, 2).reshape(length, sums_LSKCH.shape[2], -1)


@partial(jax.jit, donate_argnames=("path", "path_gradient"))
def extend_path(path: Path, path_gradient: PathGradient, keys_values: KeysValues, is_real_T: jax.Array) -> tuple[Path, PathGradient]:
    """The path (donated) with a chunk's keys and values written behind it, to which nothing is owed yet: their gradient (donated) is zero.

    num_blocks stays: the caller says how long the path is that it reads. A chunk of the constant prefix has no gradient: what it makes zero instead,
    the first blocks there are, is nobody's, since no chunk that has one is on the path.
    """
    where = (0, path.num_blocks, 0, 0, 0)
    k, v = (jax.lax.dynamic_update_slice(old, _blocks(new), where) for old, new in zip(path[:2], keys_values, strict=True))
    is_real = jax.lax.dynamic_update_slice(path.is_real_SC, is_real_T.reshape(-1, TILE), (path.num_blocks, 0))
    here = (0, jnp.maximum(path.num_blocks - path_gradient.num_constant, 0), 0, 0, 0)
    d_k, d_v = (
        jax.lax.dynamic_update_slice(sums, jnp.zeros_like(_blocks(new)), here) for sums, new in zip(path_gradient[:2], keys_values, strict=True)
    )
    return Path(k, v, is_real, path.num_blocks), path_gradient._replace(k_LSKCH=d_k, v_LSKCH=d_v)


def _blocks(chunk_LTKH: jax.Array) -> jax.Array:
    """[L, T, K, H] -> [L, T / 64, K, 64, H]."""
    layers, length, heads, size = chunk_LTKH.shape
    return chunk_LTKH.reshape(layers, length // TILE, TILE, heads, size).swapaxes(2, 3)


def _adapters(model: Model, arrays: Arrays, slots: AdapterTree, g: jax.Array) -> RowAdapters:
    """One layer's adapters of the tiles of block g."""
    return gather_rows(slots, model.scale_A, arrays.slot_GP[g])


def _angles(arrays: Arrays, g: jax.Array, config: ModelConfig) -> Angles:
    return rotary_angles(config, _take(arrays.depth_RC, g, arrays))


def _each_block(arrays: Arrays, visit: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """visit(block, carry) for each block that holds a piece, in order; the carry, updated in place, is returned."""
    if len(arrays.slot_GP) == 1:
        return visit(jnp.int32(0), start)
    return jax.lax.fori_loop(0, arrays.num_blocks, visit, start)


def _take(x_R: jax.Array, g: jax.Array, arrays: Arrays) -> jax.Array:
    """The rows of block g, [P, ...]."""
    size = arrays.slot_GP.shape[1]
    return jax.lax.dynamic_slice_in_dim(x_R, g * size, size)


def _put(x_R: jax.Array, g: jax.Array, part_P: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_R, part_P, g * len(part_P), 0)


def _add_rows(
    totals: AdapterTree, layer: jax.Array, slot_P: jax.Array, modules: Sequence[str], parts: tuple[Mapping[str, jax.Array], ...]
) -> AdapterTree:
    """totals[layer, slot[p]] += part[p] of these modules, one row after another: a scatter-add may reorder, and order is what isolation is made of.

    parts: the gradients of a and of b, leaves [P, ...]."""

    def added(total_LA: jax.Array, part_P: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, len(slot_P), lambda p, total: total.at[layer, slot_P[p]].add(part_P[p]), total_LA)

    return {side: totals[side] | {m: added(totals[side][m], part[m]) for m in modules} for side, part in zip(("a", "b"), parts, strict=True)}


def _flat(x_RC: jax.Array) -> jax.Array:
    """[R, C, ...] -> [T, ...]."""
    return x_RC.reshape(-1, *x_RC.shape[2:])


def _rows(x_T: jax.Array) -> jax.Array:
    """[T, ...] -> [R, C, ...]."""
    return x_T.reshape(-1, TILE, *x_T.shape[1:])
