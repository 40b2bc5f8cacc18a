"""The decoder: one block function, used by the learner (scan over stacked layers) and by the sampler (loop over a list of layers).

Activations are [R, C, D]: R rows of C positions, where all positions of a row belong to one run (the learner's rows are tiles of 64 positions,
the sampler's are lane tiles or prefill chunks). Base weights are frozen arguments; only adapters are ever trained.
This module deliberately knows neither masks, nor pages, nor losses: attention is handed in.

    R row   C position within a row   D model   F mlp   N query heads   K kv heads   H head size   V vocabulary   L layer
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from noria.model.attention import Pairs, attend
from noria.model.config import ModelConfig
from noria.model.lora import HEAD, Deltas, HostAdapter, RowAdapters, delta
from noria.types import TILE, IntArray

Weights: TypeAlias = Mapping[str, jax.Array]
"""One layer's base weights: attn_norm [D], q [D, N*H], k, v [D, K*H], o [N*H, D], mlp_norm [D], gate, up [D, F], down [F, D]; and, where the model
has them, q_bias [N*H], k_bias, v_bias [K*H], o_bias [D], q_norm, k_norm [H]."""

Angles: TypeAlias = tuple[jax.Array, jax.Array]
"""cos and sin of the rotary angles, [R, C, 1, H/2] each, both times the attention factor."""

Attention: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [R, C, N, H], k [R, C, K, H], v [R, C, K, H]) -> out [R, C, N, H]."""


def rotary_angles(config: ModelConfig, position_RC: jax.Array) -> Angles:
    """Angles of the given positions (Su et al., RoFormer, eq. 15), float32."""
    inverse = jnp.array(config.rope.inverse_frequencies, jnp.float32)
    angle = position_RC[..., None, None].astype(jnp.float32) * inverse
    return jnp.cos(angle) * config.rope.attention_factor, jnp.sin(angle) * config.rope.attention_factor


def rotate(x_RCNH: jax.Array, angles: Angles) -> jax.Array:
    """Apply rotary angles, halves convention (dimension h pairs with h + H/2, as Hugging Face lays weights out)."""
    cos, sin = angles
    low, high = jnp.split(x_RCNH, 2, axis=-1)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def rms_norm(x: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight, in float32 (Zhang and Sennrich 2019)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight_D.astype(jnp.float32)


def precision_of(weight: jax.Array) -> jax.lax.Precision:
    """Full precision for float32 weights, where GPUs would take TF32 (1e-3) by themselves; the native one for bfloat16."""
    return jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def head_product(params: Mapping[str, Any], normed_MD: jax.Array) -> jax.Array:
    """The head alone: logits [M, V] float32 of normed hidden states, in the head's dtype."""
    head_VD = params.get("head", params["embed"])
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        normed_MD.astype(head_VD.dtype), head_VD, contract, precision=precision_of(head_VD), preferred_element_type=jnp.float32
    )


@jax.custom_vjp
def base_product(x_WI: jax.Array, weight_IO: jax.Array) -> jax.Array:
    """x @ weight in the weight's dtype, summed in float32; float32 [W, O].

    The gradient that comes back is rounded to that dtype too, as x is. By itself JAX would multiply it as it is, in float32, with a weight that is
    converted anew for every tile: three times as long on a CPU with bfloat16.
    """
    return jnp.matmul(x_WI.astype(weight_IO.dtype), weight_IO, preferred_element_type=jnp.float32, precision=precision_of(weight_IO))


def _base_product_forward(x_WI: jax.Array, weight_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return base_product(x_WI, weight_IO), (x_WI, weight_IO)


def _base_product_backward(kept: tuple[jax.Array, jax.Array], d_WO: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of x, and of the weight, which nobody asks for while the base is frozen, and which then costs nothing."""
    x_WI, weight_IO = kept
    d_WO = d_WO.astype(weight_IO.dtype)
    product = partial(jax.lax.dot_general, precision=precision_of(weight_IO), preferred_element_type=jnp.float32)
    d_x_WI = product(d_WO, weight_IO, (((1,), (1,)), ((), ())))
    d_weight_IO = product(x_WI.astype(weight_IO.dtype), d_WO, (((0,), (0,)), ((), ())))
    return d_x_WI.astype(x_WI.dtype), d_weight_IO.astype(weight_IO.dtype)


base_product.defvjp(_base_product_forward, _base_product_backward)


def project(weights: Weights, adapters: Deltas | None, names: tuple[str, ...], x_RCI: jax.Array) -> tuple[jax.Array, ...]:
    """Of each module that reads x: x @ weight + bias + the rows' LoRA deltas, float32 [R, C, O]; base products run in the weights' dtype."""
    rows, length, size = x_RCI.shape
    x_WI = x_RCI.reshape(rows * length, size)

    def base(name: str) -> jax.Array:
        bias_O = weights.get(f"{name}_bias")
        y = base_product(x_WI, weights[name]).reshape(rows, length, -1)
        return y if bias_O is None else y + bias_O

    ys = tuple(base(name) for name in names)
    return ys if adapters is None else adapters.add(names, x_RCI, ys)


def before_attention(
    weights: Weights, adapters: Deltas | None, x_RCD: jax.Array, angles: Angles, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norm, q/k/v projections, head norms where the model has them, rotary: q [R, C, N, H], k and v [R, C, K, H]."""
    h = rms_norm(x_RCD, weights["attn_norm"], config.rms_norm_eps)
    heads = (*x_RCD.shape[:2], -1, config.head_dim)
    q, k, v = (y.reshape(heads) for y in project(weights, adapters, ("q", "k", "v"), h))
    if config.qk_norm:
        q, k = (rms_norm(x, weights[f"{name}_norm"], config.rms_norm_eps) for name, x in (("q", q), ("k", k)))
    return rotate(q, angles), rotate(k, angles), v


def after_attention(weights: Weights, adapters: Deltas | None, x_RCD: jax.Array, out_RCNH: jax.Array, config: ModelConfig) -> jax.Array:
    """Output projection, residual, norm, gated MLP, residual: the layer's output [R, C, D]."""
    (o,) = project(weights, adapters, ("o",), out_RCNH.reshape(*x_RCD.shape[:2], -1))
    x = x_RCD + o
    h = rms_norm(x, weights["mlp_norm"], config.rms_norm_eps)
    gate, up = project(weights, adapters, ("gate", "up"), h)
    (down,) = project(weights, adapters, ("down",), jax.nn.silu(gate) * up)
    return x + down


def block(weights: Weights, adapters: Deltas | None, x_RCD: jax.Array, *, angles: Angles, attention: Attention, config: ModelConfig) -> jax.Array:
    """One decoder layer."""
    q, k, v = before_attention(weights, adapters, x_RCD, angles, config)
    return after_attention(weights, adapters, x_RCD, attention(q, k, v), config)


def embed(params: Mapping[str, Any], ids: jax.Array) -> jax.Array:
    """Embeddings of ids, float32 [..., D]."""
    rows: jax.Array = params["embed"][ids]
    return rows.astype(jnp.float32)


def unembed(params: Mapping[str, Any], h_MD: jax.Array, config: ModelConfig) -> jax.Array:
    """Final norm and head: logits [M, V], float32. h is the last layer's output."""
    return head_product(params, rms_norm(h_MD, params["final_norm"], config.rms_norm_eps))


def forward_logits(
    params: Mapping[str, Any], config: ModelConfig, ids_T: IntArray, adapter: HostAdapter | None = None, scale: float = 0.0
) -> jax.Array:
    """Plain causal logits [T, V] of one sequence, float32: the entry point for comparisons with other implementations.

    params: stacked weights (`{"embed", "final_norm", "layers": {name: [L, ...]}}`, "head" if untied). adapter: one run's, scaled by `scale`; its
    module "head", where it has one, adds its delta to the logits.
    """
    length = len(ids_T)
    blocks = -(-length // TILE)
    pad = blocks * TILE - length
    ids_RC = jnp.pad(jnp.asarray(ids_T, jnp.int32), (0, pad)).reshape(blocks, TILE)
    end_T = jnp.concatenate((jnp.full(length, length, jnp.int32), jnp.arange(length, length + pad, dtype=jnp.int32) + 1))
    query_X, key_X = jnp.tril_indices(blocks)
    pairs = Pairs(query_X.astype(jnp.int32), key_X.astype(jnp.int32), jnp.int32(len(query_X)))
    angles = rotary_angles(config, jnp.arange(blocks * TILE).reshape(blocks, TILE))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        return attend(flat[0], flat[1], flat[2], pairs, end_T)[0].reshape(q.shape)

    x = embed(params, ids_RC)
    for layer in range(config.num_layers):
        weights = {name: w[layer] for name, w in params["layers"].items()}
        x = block(weights, _same_in_rows(adapter, layer, scale, blocks), x, angles=angles, attention=attention, config=config)
    h_TD = rms_norm(x.reshape(blocks * TILE, -1)[:length], params["final_norm"], config.rms_norm_eps)
    logits_TV = head_product(params, h_TD)
    if adapter is None or HEAD not in adapter["a"]:
        return logits_TV
    return logits_TV + delta(h_TD[None], jnp.asarray(adapter["a"][HEAD]), jnp.asarray(adapter["b"][HEAD]), jnp.full(1, scale))[0]


def _same_in_rows(adapter: HostAdapter | None, layer: int, scale: float, num_rows: int) -> RowAdapters | None:
    """One run's adapter of one layer for every row."""
    if adapter is None:
        return None
    a, b = ({m: jnp.broadcast_to(leaf[layer], (num_rows, *leaf.shape[1:])) for m, leaf in adapter[side].items() if m != HEAD} for side in ("a", "b"))
    return RowAdapters(a, b, jnp.full(num_rows, scale))
