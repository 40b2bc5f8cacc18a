"""The learner's two phases on one packed microbatch: score (forward) and pull (backward). All jitted functions of training live here.

    score   ids, adapters -> per-entry outputs, and residuals: each layer's input and attention's (out, lse), nothing else
    (a loss turns outputs into cotangents: rl/losses.py)
    pull    residuals, cotangents -> adds every tile's gradient to its slot's accumulator

The pull is our own reverse scan over layers: it recomputes what score did not keep, and its carry holds the accumulators, which are therefore
updated in place. The gradient is taken with respect to the adapters *gathered per tile* and then added tile by tile, in the order of the tiles:
a slot's sum depends on its own run's order only, whatever its neighbours (design section 6).

    L layer   A adapter slot   R tile (row of C = 64 positions)   T = R * C position   M entry   D model   N, K, H heads   V vocabulary
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from noria.model.attention import Pairs, attend_backward, attend_forward
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
    angles = rotary_angles(config, arrays.depth_RC)

    def layer(x_RCD: jax.Array, scanned: tuple[Weights, AdapterTree]) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        weights, slots_of_layer = scanned
        adapters = gather_rows(slots_of_layer, scale_A, arrays.slot_R)
        q, k, v = (_flat(a) for a in before_attention(weights, adapters, x_RCD, angles, config))
        out, lse = attend_forward(q, k, v, arrays.pairs, arrays.end_T)
        return after_attention(weights, adapters, x_RCD, _rows(out), config), (x_RCD, out, lse)

    x_RCD, (x_LRCD, out_LTNH, lse_LTN) = jax.lax.scan(layer, embed(params, arrays.ids_RC), (params["layers"], slots))
    h_TD = _flat(x_RCD)
    return _head_outputs(params, h_TD, arrays, config), Residuals(x_LRCD, out_LTNH, lse_LTN, h_TD)


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
    angles = rotary_angles(config, arrays.depth_RC)
    d_x_RCD = _rows(_head_pull(params, residuals.h_TD, arrays, cotangent_M, config))

    def layer(
        carry: tuple[jax.Array, AdapterTree], scanned: tuple[jax.Array, Weights, AdapterTree, jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, AdapterTree], None]:
        d_x, sums = carry
        index, weights, slots_of_layer, x, out, lse = scanned
        adapters = gather_rows(slots_of_layer, scale_A, arrays.slot_R)
        d_x, gradient = _layer_pull(weights, adapters, (x, out, lse), d_x, angles=angles, arrays=arrays, config=config)
        sums = jax.tree.map(lambda total, part_R: _add_rows(total, index, arrays.slot_R, part_R), sums, gradient)
        return (d_x, sums), None

    layers = jnp.arange(config.num_layers)
    scanned = (layers, params["layers"], slots, residuals.x_LRCD, residuals.out_LTNH, residuals.lse_LTN)
    (_, accumulators), _ = jax.lax.scan(layer, (d_x_RCD, accumulators), scanned, reverse=True)
    return accumulators


def _add_rows(total_LA: jax.Array, layer: jax.Array, slot_R: jax.Array, part_R: jax.Array) -> jax.Array:
    """total[layer, slot[r]] += part[r], one row after another: a scatter-add may reorder, and order is what isolation is made of."""
    return jax.lax.fori_loop(0, slot_R.shape[0], lambda r, total: total.at[layer, slot_R[r]].add(part_R[r]), total_LA)


def _layer_pull(
    weights: Weights,
    adapters: RowAdapters,
    saved: tuple[jax.Array, jax.Array, jax.Array],
    d_y_RCD: jax.Array,
    *,
    angles: Angles,
    arrays: Arrays,
    config: ModelConfig,
) -> tuple[jax.Array, AdapterTree]:
    """Cotangent of a layer's input, and the gradient of its gathered adapters (leaves [R, ...]), from the cotangent of its output."""
    x, out, lse = saved

    def before(x: jax.Array, a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        return before_attention(weights, RowAdapters(a, b, adapters.scale_R), x, angles, config)

    def after(x: jax.Array, out: jax.Array, a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> jax.Array:
        return after_attention(weights, RowAdapters(a, b, adapters.scale_R), x, out, config)

    _, pull_after = jax.vjp(after, x, _rows(out), adapters.a, adapters.b)
    d_x, d_out, a_after, b_after = pull_after(d_y_RCD)
    qkv, pull_before = jax.vjp(before, x, adapters.a, adapters.b)
    q, k, v = (_flat(part) for part in qkv)
    d_qkv = attend_backward((q, k, v, arrays.pairs, arrays.end_T), out, lse, _flat(d_out), None)
    d_q, d_k, d_v = (_rows(part) for part in d_qkv)
    d_x_before, a_before, b_before = pull_before((d_q, d_k, d_v))
    early = ("q", "k", "v")
    gradient = {
        "a": {m: (a_before if m in early else a_after)[m] for m in adapters.a},
        "b": {m: (b_before if m in early else b_after)[m] for m in adapters.b},
    }
    return d_x + d_x_before, gradient


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
