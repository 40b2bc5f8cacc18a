"""The learner's two phases on one packed microbatch: score (forward) and pull (backward). All jitted functions of training live here.

    score   ids, adapters -> per-entry outputs, and residuals: each layer's input and attention's (out, lse), nothing else
    (a loss turns outputs into cotangents: rl/losses.py)
    pull    residuals, cotangents -> adds every tile's gradient to its slot's accumulator

The pull is our own reverse scan over layers: it recomputes what score did not keep, and its carry holds the accumulators, which are therefore
updated in place. The gradient is taken with respect to the adapters *gathered per tile* and then added tile by tile, in the order of the tiles:
a slot's sum depends on its own run's order only, whatever its neighbours (design section 6).

A microbatch may be a chunk of a tree too long for one pass (learner/replay.py): then it also reads the keys and values of the path before it, hands
its own out, and its pull adds what it owes the path to the path's gradient. Without a path nothing of that exists in the program.

    L layer   A adapter slot   R tile (row of C = 64 positions)   T = R * C position   M entry   D model   N, K, H heads   V vocabulary
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from noria.model.attention import Pairs, Path, PathLayer, attend_backward, attend_forward, path_backward
from noria.model.config import ModelConfig
from noria.model.lora import AdapterTree, RowAdapters, gather_rows
from noria.model.transformer import (
    Angles,
    Weights,
    after_attention,
    before_attention,
    embed,
    head_product,
    precision_of,
    rms_norm,
    rotary_angles,
)
from noria.rl.losses import LossInputs, LossMetrics, LossTable, cotangents
from noria.types import TILE, Microbatch

ENTRY_CHUNK = 64
"""Entries per pass of the head: its logits are the largest temporary (64 x 49,152 float32 is 12 MiB), and 64 rows reach matmul speed."""


class Arrays(NamedTuple):
    """A microbatch on the device. ids_RC, depth_RC; end_T; slot_R; pairs; predict_from_M, target_M, temperature_M; num_chunks: chunks of
    ENTRY_CHUNK entries that hold any (traced: unused chunks cost nothing)."""

    ids_RC: jax.Array
    depth_RC: jax.Array
    end_T: jax.Array
    slot_R: jax.Array
    pairs: Pairs
    predict_from_M: jax.Array
    target_M: jax.Array
    temperature_M: jax.Array
    num_chunks: jax.Array


class TokenOutputs(NamedTuple):
    """What a loss may see of the policy, per entry: learner_logprobs_M (natural log, after temperature, full vocabulary) and entropy_M (nats)."""

    learner_logprobs_M: jax.Array
    entropy_M: jax.Array


class Residuals(NamedTuple):
    """What score keeps for pull: x_LRCD layer inputs, out_LTNH and lse_LTN of attention, h_TD the last layer's output."""

    x_LRCD: jax.Array
    out_LTNH: jax.Array
    lse_LTN: jax.Array
    h_TD: jax.Array


KeysValues: TypeAlias = tuple[jax.Array, jax.Array]
"""Keys and values, or their gradients: of a chunk [L, T, K, H] each, of a path [L, S, K, 64, H] each."""


def to_device(microbatch: Microbatch) -> Arrays:
    """The microbatch's arrays as the jitted functions take them."""
    entries = microbatch.entries
    assert len(entries) % ENTRY_CHUNK == 0, "entry axes are multiples of the head's chunk"
    return Arrays(
        ids_RC=jnp.asarray(microbatch.ids_T.reshape(-1, TILE)),
        depth_RC=jnp.asarray(microbatch.depth_T.reshape(-1, TILE)),
        end_T=jnp.asarray(microbatch.end_T),
        slot_R=jnp.asarray(microbatch.slot_tile_B),
        pairs=Pairs(jnp.asarray(microbatch.pair_query_X), jnp.asarray(microbatch.pair_key_X), jnp.int32(microbatch.num_pairs)),
        predict_from_M=jnp.asarray(entries.predict_from_M),
        target_M=jnp.asarray(entries.target_M),
        temperature_M=jnp.asarray(entries.temperature_M),
        num_chunks=jnp.int32(-(-microbatch.num_entries // ENTRY_CHUNK)),
    )


def loss_inputs(microbatch: Microbatch) -> LossInputs:
    """What the loss reads of the microbatch's entries, on the device."""
    entries = microbatch.entries
    columns = (entries.behavior_logprobs_M, entries.advantage_M, entries.weight_M, entries.sequence_M, microbatch.slot_M)
    return LossInputs(*(jnp.asarray(column) for column in columns))


@partial(jax.jit, static_argnames=("config",))
def score(params: Mapping[str, Any], slots: AdapterTree, scale_A: jax.Array, arrays: Arrays, config: ModelConfig) -> tuple[TokenOutputs, Residuals]:
    """Forward pass of a microbatch. params: stacked base weights; slots: leaves [L, A, ...]; static: config."""
    outputs, residuals, _ = _forward(params, slots, scale_A, arrays, config, None)
    return outputs, residuals


@partial(jax.jit, static_argnames=("config",))
def score_chunk(
    params: Mapping[str, Any], slots: AdapterTree, scale_A: jax.Array, arrays: Arrays, path: Path, config: ModelConfig
) -> tuple[TokenOutputs, Residuals, KeysValues]:
    """Forward pass of a chunk after `path`, with the chunk's own keys and values."""
    outputs, residuals, keys_values = _forward(params, slots, scale_A, arrays, config, path)
    assert keys_values is not None
    return outputs, residuals, keys_values


def _forward(
    params: Mapping[str, Any], slots: AdapterTree, scale_A: jax.Array, arrays: Arrays, config: ModelConfig, path: Path | None
) -> tuple[TokenOutputs, Residuals, KeysValues | None]:
    angles = rotary_angles(config, arrays.depth_RC)

    def layer(x_RCD: jax.Array, scanned: tuple[jax.Array, Weights, AdapterTree]) -> tuple[jax.Array, Any]:
        index, weights, slots_of_layer = scanned
        adapters = gather_rows(slots_of_layer, scale_A, arrays.slot_R)
        q, k, v = (_flat(a) for a in before_attention(weights, adapters, x_RCD, angles, config))
        out, lse = attend_forward(q, k, v, arrays.pairs, arrays.end_T, None if path is None else PathLayer(path, index))
        return after_attention(weights, adapters, x_RCD, _rows(out), config), ((x_RCD, out, lse), None if path is None else (k, v))

    scanned = (jnp.arange(config.num_layers), params["layers"], slots)
    x_RCD, ((x_LRCD, out_LTNH, lse_LTN), keys_values) = jax.lax.scan(layer, embed(params, arrays.ids_RC), scanned)
    h_TD = _flat(x_RCD)
    return _head_outputs(params, h_TD, arrays, config), Residuals(x_LRCD, out_LTNH, lse_LTN, h_TD), keys_values


@jax.jit
def loss_cotangents(outputs: TokenOutputs, inputs: LossInputs, table: LossTable) -> tuple[jax.Array, LossMetrics]:
    """Cotangents [M] of a scored microbatch and the sums of its metrics per slot (`rl.losses.cotangents`); nothing is static."""
    return cotangents(outputs.learner_logprobs_M, outputs.entropy_M, inputs, table)


@partial(jax.jit, static_argnames=("config",), donate_argnames=("accumulators",))
def pull(
    params: Mapping[str, Any],
    slots: AdapterTree,
    scale_A: jax.Array,
    arrays: Arrays,
    residuals: Residuals,
    *,
    cotangent_M: jax.Array,
    accumulators: AdapterTree,
    config: ModelConfig,
) -> AdapterTree:
    """Add the gradient of sum(cotangent_M * learner_logprobs_M) to the accumulators (leaves [L, A, ...], donated) and return them."""
    accumulators, _ = _backward(
        params, slots, scale_A, arrays, residuals, cotangent_M=cotangent_M, sums=(accumulators, None), path=None, config=config
    )
    return accumulators


@partial(jax.jit, static_argnames=("config",), donate_argnames=("accumulators", "path_gradient"))
def pull_chunk(
    params: Mapping[str, Any],
    slots: AdapterTree,
    scale_A: jax.Array,
    arrays: Arrays,
    residuals: Residuals,
    *,
    cotangent_M: jax.Array,
    accumulators: AdapterTree,
    path: Path,
    path_gradient: KeysValues,
    config: ModelConfig,
) -> tuple[AdapterTree, KeysValues]:
    """As `pull`, for a chunk after `path`. path_gradient (donated) holds at the chunk's own blocks, those after the path's, what its descendants owe
    its keys and values, or zeros; returned with what this chunk owes the path's blocks. Its own blocks stay as they are: see `clear_path`."""
    sums = (accumulators, path_gradient)
    accumulators, gradient = _backward(params, slots, scale_A, arrays, residuals, cotangent_M=cotangent_M, sums=sums, path=path, config=config)
    assert gradient is not None
    return accumulators, gradient


def _backward(
    params: Mapping[str, Any],
    slots: AdapterTree,
    scale_A: jax.Array,
    arrays: Arrays,
    residuals: Residuals,
    *,
    cotangent_M: jax.Array,
    sums: tuple[AdapterTree, KeysValues | None],
    path: Path | None,
    config: ModelConfig,
) -> tuple[AdapterTree, KeysValues | None]:
    """The reverse scan over layers. Its carry holds what is accumulated, so that it is updated in place: as inputs and outputs of a scan, or by a
    plain vjp over the path's keys and values, a second copy would live."""
    angles = rotary_angles(config, arrays.depth_RC)
    d_x_RCD = _rows(_head_pull(params, residuals.h_TD, arrays, cotangent_M, config))

    def layer(carry: Any, scanned: tuple[jax.Array, Weights, AdapterTree, jax.Array, jax.Array, jax.Array]) -> tuple[Any, None]:
        d_x, totals, path_sums = carry
        index, weights, slots_of_layer, x, out, lse = scanned
        adapters = gather_rows(slots_of_layer, scale_A, arrays.slot_R)

        def attention_pull(qkv: tuple[jax.Array, jax.Array, jax.Array], d_out: jax.Array) -> tuple[Any, KeysValues | None]:
            d_qkv = attend_backward((*qkv, arrays.pairs, arrays.end_T), out, lse, d_out, None)
            if path is None or path_sums is None:
                return d_qkv, None
            return _path_pull(qkv[0], d_qkv, (out, lse), d_out, before=PathLayer(path, index), sums=path_sums)

        d_x, gradient, path_sums = _layer_pull(weights, adapters, (x, out), d_x, angles=angles, attention_pull=attention_pull, config=config)
        totals = jax.tree.map(lambda total, part_R: _add_rows(total, index, arrays.slot_R, part_R), totals, gradient)
        return (d_x, totals, path_sums), None

    layers = jnp.arange(config.num_layers)
    scanned = (layers, params["layers"], slots, residuals.x_LRCD, residuals.out_LTNH, residuals.lse_LTN)
    (_, accumulators, path_gradient), _ = jax.lax.scan(layer, (d_x_RCD, *sums), scanned, reverse=True)
    return accumulators, path_gradient


def _path_pull(
    q: jax.Array,
    d_qkv: tuple[jax.Array, jax.Array, jax.Array],
    outputs: tuple[jax.Array, jax.Array],
    d_out: jax.Array,
    *,
    before: PathLayer,
    sums: KeysValues,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], KeysValues]:
    """A chunk's exchange with its path in one layer: it reads what its descendants left at its own blocks, and leaves what it owes the path's."""
    d_q, d_k, d_v = d_qkv
    d_q_path, sums = path_backward(q, before, outputs, d_out, sums)
    return (d_q + d_q_path, d_k + _own(sums[0], before, d_k.shape[0]), d_v + _own(sums[1], before, d_v.shape[0])), sums


def _own(sums_LSKCH: jax.Array, before: PathLayer, length: int) -> jax.Array:
    """The gradient at the chunk's own blocks as [T, K, H]. Read, and not replaced by zeros at once: XLA would copy the whole buffer to do both."""
    where = (before.layer, before.path.num_blocks, 0, 0, 0)
    own = jax.lax.dynamic_slice(sums_LSKCH, where, (1, length // TILE, *sums_LSKCH.shape[2:]))
    return own[0].swapaxes(1, 2).reshape(length, sums_LSKCH.shape[2], -1)


@partial(jax.jit, static_argnames=("num_blocks",), donate_argnames=("path_gradient",))
def clear_path(path_gradient: KeysValues, first_block: jax.Array, num_blocks: int) -> KeysValues:
    """The path's gradient (donated) with zeros from first_block on: a chunk that was pulled leaves the path."""
    empty = jnp.zeros((path_gradient[0].shape[0], num_blocks, *path_gradient[0].shape[2:]))
    keys, values = (jax.lax.dynamic_update_slice(sums, empty, (0, first_block, 0, 0, 0)) for sums in path_gradient)
    return keys, values


@partial(jax.jit, donate_argnames=("path",))
def extend_path(path: Path, keys_values: KeysValues, is_real_T: jax.Array) -> Path:
    """The path (donated) with a chunk's keys and values written behind it. num_blocks stays: the caller says how long the path is that it reads."""
    k, v = (_write_blocks(old, new, path.num_blocks) for old, new in zip(path[:2], keys_values, strict=True))
    is_real = jax.lax.dynamic_update_slice(path.is_real_SC, is_real_T.reshape(-1, TILE), (path.num_blocks, 0))
    return Path(k, v, is_real, path.num_blocks)


def _write_blocks(path_LSKCH: jax.Array, chunk_LTKH: jax.Array, first_block: jax.Array) -> jax.Array:
    layers, length, heads, size = chunk_LTKH.shape
    blocks = chunk_LTKH.reshape(layers, length // TILE, TILE, heads, size).swapaxes(2, 3)
    return jax.lax.dynamic_update_slice(path_LSKCH, blocks, (0, first_block, 0, 0, 0))


def _add_rows(total_LA: jax.Array, layer: jax.Array, slot_R: jax.Array, part_R: jax.Array) -> jax.Array:
    """total[layer, slot[r]] += part[r], one row after another: a scatter-add may reorder, and order is what isolation is made of."""
    return jax.lax.fori_loop(0, slot_R.shape[0], lambda r, total: total.at[layer, slot_R[r]].add(part_R[r]), total_LA)


def _layer_pull(
    weights: Weights,
    adapters: RowAdapters,
    saved: tuple[jax.Array, jax.Array],
    d_y_RCD: jax.Array,
    *,
    angles: Angles,
    attention_pull: Callable[[tuple[jax.Array, jax.Array, jax.Array], jax.Array], tuple[Any, KeysValues | None]],
    config: ModelConfig,
) -> tuple[jax.Array, AdapterTree, KeysValues | None]:
    """Cotangent of a layer's input, the gradient of its gathered adapters (leaves [R, ...]), and what attention_pull made of the path's gradient,
    from the cotangent of the layer's output. attention_pull: (q, k, v), d_out -> (their cotangents, path gradient)."""
    x, out = saved

    def before(x: jax.Array, a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        return before_attention(weights, RowAdapters(a, b, adapters.scale_R), x, angles, config)

    def after(x: jax.Array, out: jax.Array, a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> jax.Array:
        return after_attention(weights, RowAdapters(a, b, adapters.scale_R), x, out, config)

    _, pull_after = jax.vjp(after, x, _rows(out), adapters.a, adapters.b)
    d_x, d_out, a_after, b_after = pull_after(d_y_RCD)
    (q, k, v), pull_before = jax.vjp(before, x, adapters.a, adapters.b)
    d_qkv, path_gradient = attention_pull((_flat(q), _flat(k), _flat(v)), _flat(d_out))
    d_q, d_k, d_v = (_rows(part) for part in d_qkv)
    d_x_before, a_before, b_before = pull_before((d_q, d_k, d_v))
    early = ("q", "k", "v")
    gradient = {
        "a": {m: (a_before if m in early else a_after)[m] for m in adapters.a},
        "b": {m: (b_before if m in early else b_after)[m] for m in adapters.b},
    }
    return d_x + d_x_before, gradient, path_gradient


def _head_outputs(params: Mapping[str, Any], h_TD: jax.Array, arrays: Arrays, config: ModelConfig) -> TokenOutputs:
    def chunk(c: jax.Array, carry: TokenOutputs) -> TokenOutputs:
        log_p_MV, _ = _chunk_log_softmax(params, h_TD, arrays, c, config)
        target = _chunk(arrays.target_M, c)
        chosen = jnp.take_along_axis(log_p_MV, target[:, None], axis=1)[:, 0]
        entropy = -(jnp.exp(log_p_MV) * log_p_MV).sum(-1)
        return TokenOutputs(_set_chunk(carry.learner_logprobs_M, c, chosen), _set_chunk(carry.entropy_M, c, entropy))

    zeros = jnp.zeros_like(arrays.temperature_M)
    return jax.lax.fori_loop(0, arrays.num_chunks, chunk, TokenOutputs(zeros, zeros))


def _head_pull(params: Mapping[str, Any], h_TD: jax.Array, arrays: Arrays, cotangent_M: jax.Array, config: ModelConfig) -> jax.Array:
    """Cotangent of h_TD: d log p[target] / d logits = (onehot - p) / temperature, entry by entry in order."""
    head_VD = params.get("head", params["embed"])

    def chunk(c: jax.Array, d_h_TD: jax.Array) -> jax.Array:
        log_p_MV, pull_norm = _chunk_log_softmax(params, h_TD, arrays, c, config)
        scale = _chunk(cotangent_M, c) / _chunk(arrays.temperature_M, c)
        onehot = jnp.arange(log_p_MV.shape[1])[None, :] == _chunk(arrays.target_M, c)[:, None]
        d_logits_MV = (onehot - jnp.exp(log_p_MV)) * scale[:, None]
        d_normed = jnp.matmul(d_logits_MV.astype(head_VD.dtype), head_VD, precision=precision_of(head_VD), preferred_element_type=jnp.float32)
        (d_rows_MD,) = pull_norm(d_normed)
        start = c * ENTRY_CHUNK

        def add(m: jax.Array, d_h: jax.Array) -> jax.Array:
            return d_h.at[arrays.predict_from_M[start + m]].add(d_rows_MD[m])

        return jax.lax.fori_loop(0, ENTRY_CHUNK, add, d_h_TD)

    return jax.lax.fori_loop(0, arrays.num_chunks, chunk, jnp.zeros_like(h_TD))


def _chunk_log_softmax(params: Mapping[str, Any], h_TD: jax.Array, arrays: Arrays, c: jax.Array, config: ModelConfig):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Log-probabilities [ENTRY_CHUNK, V] of chunk c after temperature, and the pull of the final norm (kept apart: the head is frozen)."""
    rows_MD = h_TD[_chunk(arrays.predict_from_M, c)]
    normed, pull_norm = jax.vjp(lambda h: rms_norm(h, params["final_norm"], config.rms_norm_eps), rows_MD)
    logits = head_product(params, normed)
    return jax.nn.log_softmax(logits / _chunk(arrays.temperature_M, c)[:, None], axis=-1), pull_norm


def _chunk(x_M: jax.Array, c: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_M, c * ENTRY_CHUNK, ENTRY_CHUNK)


def _set_chunk(x_M: jax.Array, c: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_M, part, c * ENTRY_CHUNK, 0)


def _flat(x_RC: jax.Array) -> jax.Array:
    """[R, C, ...] -> [T, ...]."""
    return x_RC.reshape(-1, *x_RC.shape[2:])


def _rows(x_T: jax.Array) -> jax.Array:
    """[T, ...] -> [R, C, ...]."""
    return x_T.reshape(-1, TILE, *x_T.shape[1:])
