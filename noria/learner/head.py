"""What the entries of a microbatch say, and how their cotangents come back: final norm, unembedding, value head. Used by learner/step.py only.

    h_TD ──gather at predict_from──▶ rows ──final norm──▶ logits ──▶ learner_logprobs, entropy
                                                     └──▶ value

In chunks of ENTRY_CHUNK entries, of which only those that hold any are computed: no [M, V] array ever exists. Two modules stand outside the layers:
"head", the delta of the unembedding, and "value", the value head, which is nothing but a delta. Whether they exist is told by the slots' leaves.
Entries come in tiles of ENTRY_TILE of one run, as positions do in theirs: a top module is gathered per tile, and its gradient added tile by tile, so
that a slot's sum depends on its own run's order only.

    E tile of 16 entries   M entry (inside a chunk: its 32 entries)   A adapter slot   T position   D model   V vocabulary
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from noria.model.config import ModelConfig
from noria.model.lora import HEAD, MODULES, TOP_MODULES, VALUE, AdapterTree, delta
from noria.model.transformer import head_product, precision_of, rms_norm
from noria.rl.losses import TokenCotangents, TokenOutputs
from noria.rl.packing import ENTRY_CHUNK
from noria.types import ENTRY_TILE

Leaves: TypeAlias = dict[str, tuple[jax.Array, jax.Array]]
"""Top modules by name: a [A, D, r] and b [A, r, O] of all slots."""


class EntryArrays(NamedTuple):
    """The entries of a microbatch on the device. predict_from_M, target_M; temperature_M; slot_E; num_chunks: int32 scalar, traced, the chunks of
    ENTRY_CHUNK entries that hold any."""

    predict_from_M: jax.Array
    target_M: jax.Array
    temperature_M: jax.Array
    slot_E: jax.Array
    num_chunks: jax.Array


class Top(NamedTuple):
    """What the head reads: base weights, the slots' top modules, their scales."""

    params: Mapping[str, Any]
    leaves: Leaves
    scale_A: jax.Array


def layer_modules(tree: AdapterTree) -> AdapterTree:
    """The leaves [L, A, ...] of the modules inside the layers."""
    return {side: {m: leaf for m, leaf in leaves.items() if m in MODULES} for side, leaves in tree.items()}


def top_modules(tree: AdapterTree) -> Leaves:
    """The leaves of the modules outside the layers, without their axis of layers (of size 1)."""
    return {m: (tree["a"][m][0], tree["b"][m][0]) for m in TOP_MODULES if m in tree["a"]}


def with_top(layers: AdapterTree, top: Leaves) -> AdapterTree:
    """Both together again, the inverse of `layer_modules` and `top_modules`."""
    return {side: layers[side] | {m: pair[index][None] for m, pair in top.items()} for index, side in enumerate(("a", "b"))}


def head_outputs(top: Top, h_TD: jax.Array, entries: EntryArrays, config: ModelConfig) -> TokenOutputs:
    """The outputs of all entries, zeros beyond the last chunk that holds any. h_TD: the last layer's output."""

    def chunk(c: jax.Array, carry: TokenOutputs) -> TokenOutputs:
        normed_MD, _ = _normed(top, h_TD, entries, c, config)
        log_p_MV = _log_p(top, normed_MD, entries, c)
        chosen_M = jnp.take_along_axis(log_p_MV, _chunk(entries.target_M, c)[:, None], axis=1)[:, 0]
        value_M = _tile_deltas(top, VALUE, normed_MD, _slots(entries, c))[:, 0] if VALUE in top.leaves else jnp.zeros(ENTRY_CHUNK)
        found = TokenOutputs(chosen_M, _entropy(log_p_MV), value_M)
        return TokenOutputs(*(_set_chunk(whole_M, c, part_M) for whole_M, part_M in zip(carry, found, strict=True)))

    zeros = jnp.zeros_like(entries.temperature_M)
    return jax.lax.fori_loop(0, entries.num_chunks, chunk, TokenOutputs(zeros, zeros, zeros))


def head_pull(
    top: Top, h_TD: jax.Array, entries: EntryArrays, cotangents: TokenCotangents, sums: Leaves, *, config: ModelConfig
) -> tuple[jax.Array, Leaves]:
    """Cotangent of h_TD, and the gradients of the top modules added to `sums`.

    With logits z, s = z / temperature and p = softmax(s): d log p[target] / ds = onehot - p, and d entropy / ds = -p (log p + entropy).
    """
    head_VD = top.params.get("head", top.params["embed"])

    def chunk(c: jax.Array, carry: tuple[jax.Array, Leaves]) -> tuple[jax.Array, Leaves]:
        d_h_TD, totals = carry
        normed_MD, pull_norm = _normed(top, h_TD, entries, c, config)
        log_p_MV, slot_E = _log_p(top, normed_MD, entries, c), _slots(entries, c)
        d_chosen_M, d_entropy_M, d_value_M = (_chunk(d_M, c) for d_M in cotangents)
        d_logits_MV = _logits_cotangent(log_p_MV, _chunk(entries.target_M, c), d_chosen_M, d_entropy_M) / _chunk(entries.temperature_M, c)[:, None]
        d_normed_MD = jnp.matmul(d_logits_MV.astype(head_VD.dtype), head_VD, precision=precision_of(head_VD), preferred_element_type=jnp.float32)
        outputs = {HEAD: d_logits_MV, VALUE: d_value_M[:, None]}
        for module in totals:
            d_normed_MD, totals = _tile_pulls(top, module, normed_MD, slot_E, outputs[module], sums=(d_normed_MD, totals))
        (d_rows_MD,) = pull_norm(d_normed_MD)
        position_M = _chunk(entries.predict_from_M, c)
        d_h_TD = jax.lax.fori_loop(0, ENTRY_CHUNK, lambda m, d_h: d_h.at[position_M[m]].add(d_rows_MD[m]), d_h_TD)  # in order of the entries
        return d_h_TD, totals

    return jax.lax.fori_loop(0, entries.num_chunks, chunk, (jnp.zeros_like(h_TD), sums))


def _normed(
    top: Top, h_TD: jax.Array, entries: EntryArrays, c: jax.Array, config: ModelConfig
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array]]]:
    """The normed hidden states [ENTRY_CHUNK, D] that predict chunk c, and the pull of the norm."""
    rows_MD = h_TD[_chunk(entries.predict_from_M, c)]
    return jax.vjp(lambda h: rms_norm(h, top.params["final_norm"], config.rms_norm_eps), rows_MD)


def _log_p(top: Top, normed_MD: jax.Array, entries: EntryArrays, c: jax.Array) -> jax.Array:
    """Log-probabilities [ENTRY_CHUNK, V] of chunk c after temperature."""
    logits_MV = head_product(top.params, normed_MD)
    if HEAD in top.leaves:
        logits_MV = logits_MV + _tile_deltas(top, HEAD, normed_MD, _slots(entries, c))
    return jax.nn.log_softmax(logits_MV / _chunk(entries.temperature_M, c)[:, None], axis=-1)


def _entropy(log_p_MV: jax.Array) -> jax.Array:
    return -(jnp.exp(log_p_MV) * log_p_MV).sum(-1)


def _logits_cotangent(log_p_MV: jax.Array, target_M: jax.Array, d_chosen_M: jax.Array, d_entropy_M: jax.Array) -> jax.Array:
    """Cotangent of the logits after temperature."""
    is_target_MV = jnp.arange(log_p_MV.shape[1])[None, :] == target_M[:, None]
    p_MV = jnp.exp(log_p_MV)
    return (is_target_MV - p_MV) * d_chosen_M[:, None] - p_MV * (log_p_MV + _entropy(log_p_MV)[:, None]) * d_entropy_M[:, None]


def _tile_deltas(top: Top, module: str, x_MD: jax.Array, slot_E: jax.Array) -> jax.Array:
    """The module's delta of a chunk's entries, [ENTRY_CHUNK, O]: one tile after another, so that one slot's b is copied at a time."""
    b_ArO = top.leaves[module][1]

    def tile(e: jax.Array, out_MO: jax.Array) -> jax.Array:
        part = _tile_delta(_tile(x_MD, e), _of_slot(top.leaves[module], slot_E[e]), top.scale_A[slot_E[e]])
        return jax.lax.dynamic_update_slice_in_dim(out_MO, part, e * ENTRY_TILE, 0)

    return jax.lax.fori_loop(0, len(slot_E), tile, jnp.zeros((len(x_MD), b_ArO.shape[2])))


def _tile_pulls(
    top: Top, module: str, x_MD: jax.Array, slot_E: jax.Array, d_out_MO: jax.Array, *, sums: tuple[jax.Array, Leaves]
) -> tuple[jax.Array, Leaves]:
    """The pull of `_tile_deltas`, added to (the cotangent of x_MD, the gradients of all slots)."""
    d_x_MD, totals = sums

    def tile(e: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        d_x, total_a, total_b = carry
        slot = slot_E[e]
        _, pull = jax.vjp(lambda x, pair: _tile_delta(x, pair, top.scale_A[slot]), _tile(x_MD, e), _of_slot(top.leaves[module], slot))
        d_tile, (d_a, d_b) = pull(_tile(d_out_MO, e))
        d_x = jax.lax.dynamic_update_slice_in_dim(d_x, _tile(d_x, e) + d_tile, e * ENTRY_TILE, 0)
        return d_x, total_a.at[slot].add(d_a), total_b.at[slot].add(d_b)

    d_x_MD, total_a, total_b = jax.lax.fori_loop(0, len(slot_E), tile, (d_x_MD, *totals[module]))
    return d_x_MD, totals | {module: (total_a, total_b)}


def _tile_delta(x_MD: jax.Array, pair: tuple[jax.Array, jax.Array], scale: jax.Array) -> jax.Array:
    a_Dr, b_rO = pair
    return delta(x_MD[None], a_Dr[None], b_rO[None], scale[None])[0]


def _of_slot(pair: tuple[jax.Array, jax.Array], slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    return pair[0][slot], pair[1][slot]


def _slots(entries: EntryArrays, c: jax.Array) -> jax.Array:
    """The slots of chunk c's tiles."""
    per_chunk = ENTRY_CHUNK // ENTRY_TILE
    return jax.lax.dynamic_slice_in_dim(entries.slot_E, c * per_chunk, per_chunk)


def _tile(x_M: jax.Array, e: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_M, e * ENTRY_TILE, ENTRY_TILE)


def _chunk(x_M: jax.Array, c: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_M, c * ENTRY_CHUNK, ENTRY_CHUNK)


def _set_chunk(x_M: jax.Array, c: jax.Array, part_M: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_M, part_M, c * ENTRY_CHUNK, 0)
