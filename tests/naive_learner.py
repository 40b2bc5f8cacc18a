"""What the learner computes, once more and naively: each path of each episode a row of its own, dense attention, losses written from their formulas,
plain autodiff. Nothing is shared, packed, cut or walked.

    M entry     Q row = sequence     L index in a row
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from learner_builders import tiny
from losses_reference import POLICY, second_moment_kept, settings_of

from noria.model.lora import HEAD, TOP_MODULES, VALUE, RowAdapters
from noria.model.transformer import block, embed, head_product, rms_norm, rotary_angles
from noria.rl.losses import TokenOutputs
from noria.types import TILE


class Rows(NamedTuple):
    """Episodes as rows, and their trained tokens: each in row row_M, predicted at index at_M of it."""

    ids_QL: np.ndarray
    row_M: np.ndarray
    at_M: np.ndarray
    target_M: np.ndarray
    temperature_M: np.ndarray


def rows_of(episodes):
    """All that was sampled, episode by episode, turn by turn: the order of a tree's entries. Episodes do not fork."""
    length = -(-max(len(e.ids) for e in episodes) // TILE) * TILE
    ids_QL, entries = np.zeros((len(episodes), length), np.int32), []
    for row, episode in enumerate(episodes):
        ids_QL[row, : len(episode.ids)] = episode.ids
        start = 0
        for turn in episode.turns:
            start += len(turn.observation_ids)
            entries += [(row, start + n - 1, token, turn.temperature) for n, token in enumerate(turn.completion.sampled_ids)]
            start += len(turn.completion.sampled_ids)
    row, at, target, temperature = zip(*entries, strict=True)
    return Rows(ids_QL, *(np.array(column, np.int32) for column in (row, at, target)), np.array(temperature, np.float32))


def dense_attention(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("rinh,rjnh->rnij", q, k) * q.shape[-1] ** -0.5
    is_seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("rnij,rjnh->rinh", jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), -1), v)


def forward(adapter, scale, rows):
    """Every entry's outputs. adapter: one run's leaves [layers, ...], on whatever modules it has."""
    config, base = tiny()
    num_rows, length = rows.ids_QL.shape

    def of(module, x_M):
        if module not in adapter["a"]:
            return jnp.zeros((len(x_M), 1))
        return (x_M @ adapter["a"][module][0]) @ adapter["b"][module][0] * scale

    x, angles = embed(base.stacked, rows.ids_QL), rotary_angles(config, jnp.tile(jnp.arange(length), (num_rows, 1)))
    for layer in range(config.num_layers):
        a, b = ({m: jnp.repeat(leaf[layer][None], num_rows, 0) for m, leaf in adapter[side].items() if m not in TOP_MODULES} for side in ("a", "b"))
        deltas = RowAdapters(a, b, jnp.full(num_rows, scale))
        x = block(base.layers[layer], deltas, x, angles=angles, attention=dense_attention, config=config)
    x_M = rms_norm(x[rows.row_M, rows.at_M], base.stacked["final_norm"], config.rms_norm_eps)
    log_p_MV = jax.nn.log_softmax((head_product(base.stacked, x_M) + of(HEAD, x_M)) / rows.temperature_M[:, None], -1)
    chosen_M = jnp.take_along_axis(log_p_MV, rows.target_M[:, None], 1)[:, 0]
    return TokenOutputs(chosen_M, -(jnp.exp(log_p_MV) * log_p_MV).sum(-1), of(VALUE, x_M)[:, 0])


@partial(jax.jit, static_argnames="scale")
def outputs_of(adapter, scale, rows):
    return forward(adapter, scale, rows)


@partial(jax.jit, static_argnames="scale")
def pulled(adapter, scale, rows, cotangents):
    """The derivative with respect to the adapter of the sum of outputs times cotangents."""
    return jax.vjp(lambda each: forward(each, scale, rows), adapter)[1](cotangents)[0]


def gradient_of(adapter, scale, rows, batch, spec):
    """(loss, derivative with respect to the adapter), by the chain rule: one program of the model serves all losses."""
    loss, cotangents = jax.value_and_grad(naive_loss)(outputs_of(adapter, scale, rows), batch, spec)
    return float(loss), pulled(adapter, scale, rows, cotangents)


# ---- losses ---------------------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """What a loss reads of the entries beside the outputs, [M]; see `rl.losses.LossInputs`."""

    mu: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    sequence: np.ndarray
    reference: np.ndarray
    returns: np.ndarray
    old_value: np.ndarray
    pair: np.ndarray
    staleness: np.ndarray


def naive_loss(outputs, batch, spec):
    """A run's loss as one number, from the table of section 1 of the algorithms; differentiable in the outputs."""
    s, (th, entropy, value), (mu, a, w) = settings_of(spec), outputs, batch[:3]
    match spec.kind:
        case "cross_entropy":
            return -(w * a * th).sum()
        case "linear":
            return (w * a * th).sum()
        case "dpo":
            is_of = batch.pair[None] == np.unique(batch.pair)[:, None]
            margin = s.beta * (is_of * (a * (th - batch.reference))).sum(1)
            return -((is_of * w).max(1) * jax.nn.log_sigmoid(margin)).sum()
    loss = kept(jax.lax.stop_gradient(th), batch, s) * policy_loss(th, batch, s)
    x = th - (mu if spec.kind == "stable_reinforce" else batch.reference)
    estimate = {"k1": x, "k2": x**2 / 2, "k3": jnp.exp(-x) - 1 + x}[spec.kl_estimator or ("k2" if spec.kind == "stable_reinforce" else "k3")]
    loss += spec.kl_coeff * (jax.lax.stop_gradient(estimate - x**2 / 2) + x**2 / 2)  # each estimator reports itself, and has the gradient of KL
    loss -= spec.entropy_coeff * entropy
    if spec.kind == "ppo_critic":
        bound = spec.value_clip or jnp.inf
        clipped = batch.old_value + jnp.clip(value - batch.old_value, -bound, bound)
        loss += spec.value_coeff * jnp.maximum((value - batch.returns) ** 2, (clipped - batch.returns) ** 2)
    assert spec.kind in POLICY
    return (w * loss).sum()


def policy_loss(th, batch, s):
    """Of each token, before masks, penalties and weights. th0: the value of th, detached."""
    th0, mu, a = jax.lax.stop_gradient(th), batch.mu, batch.advantage
    r, p, mean = jnp.exp(th - mu), proximal(th0, batch, s), mean_log_ratio(th0, batch)

    def clipped(ratio):
        return jnp.minimum(ratio * a, jnp.clip(ratio, s.lo, s.hi) * a)

    def truncation(ratio):
        return jnp.minimum(ratio, s.cap) / ratio if s.cap else 1.0

    corrected = jnp.minimum(jnp.exp(p - mu), s.cap or jnp.inf) if s.cap or s.spec.icepop_high else 1.0
    r0 = jax.lax.stop_gradient(r)
    match s.kind:
        case "grpo":
            return -corrected * clipped(jnp.exp(th - p))
        case "importance_sampling" | "stable_reinforce":
            return -truncation(r0) * r * a
        case "ppo" | "ppo_critic":
            return -truncation(r0) * clipped(r)
        case "gspo":
            return -truncation(jnp.exp(mean)) * clipped(jnp.exp(mean + th - th0))
        case "cispo":
            ratio = jnp.clip(r0, s.lo, s.hi)
            return -truncation(ratio) * ratio * a * th
        case "dro":
            return -corrected * (th * a - 0.5 * s.beta * (th - mu) ** 2)
    raise AssertionError(s.kind)


def proximal(th0, batch, s):
    """log p = log mu + a (log th - log mu), a = (v_p - v_mu) / (v_th - v_mu); grpo's alone."""
    stale = np.asarray(batch.staleness, np.float32)
    share = np.where(stale > 0, np.maximum(stale - s.spec.proximal_lag, 0) / np.maximum(stale, 1), 1.0).astype(np.float32)
    return batch.mu + share * (th0 - batch.mu) if s.kind == "grpo" and s.spec.proximal_lag else th0


def mean_log_ratio(th0, batch):
    is_of = (batch.sequence[None] == batch.sequence[:, None]).astype(np.float32)
    return (is_of @ (th0 - batch.mu)) / is_of.sum(1)


def kept(th0, batch, s):
    """1 where no mask drops the token, else 0."""
    spec, mu, a = s.spec, batch.mu, batch.advantage
    keep = jnp.ones(len(mu), bool)
    if s.c:
        keep &= jnp.abs(mean_log_ratio(th0, batch)) <= np.log(s.c)
    if spec.icepop_high:
        ratio = jnp.exp(proximal(th0, batch, s) - mu)
        keep &= (ratio >= spec.icepop_low) & (ratio <= spec.icepop_high)
    moved = jnp.exp(th0) - jnp.exp(mu)
    if spec.dppo_high:
        keep &= ~((a > 0) & (moved > spec.dppo_high))
    if spec.dppo_low:
        keep &= ~((a < 0) & (moved < -spec.dppo_low))
    if spec.m2_cap:
        keep &= np.array(second_moment_kept([float(x) for x in th0 - mu], spec.m2_cap, []))
    return keep.astype(jnp.float32)
