"""Losses: per-token outputs in, cotangents out. Runs with different settings share one pass, since settings are arrays and never static.

A loss sees flat arrays over entries (M) and nothing else: no positions, no model, no microbatch. What it returns is the gradient of the run's
loss with respect to `learner_logprobs_M`; the learner pulls that through the model.

Rules that every loss here keeps:
    - ratios are exp of float32 log-ratios clamped to +-20;
    - entries that do not train (weight 0: padding) are selected away before and after the arithmetic, so nothing they hold can leak;
    - a NaN in an entry that trains is never hidden: it surfaces in that entry's cotangent;
    - an entry's result depends on its own episode and its own run's settings only, bit for bit.

Shape letters: M entry, A adapter slot, E episode (static size M: at most one episode per entry).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from noria.types import LossSpec

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8 is far outside any trust region, and its square is finite in float32."""


class LossTable(TypedDict):
    """The settings of the run in each adapter slot, float32 [A]; see `LossSpec`."""

    clip_low: Any
    clip_high: Any
    tis_cap: Any
    sequence_mask_c: Any


class LossInputs(NamedTuple):
    """What a loss reads of the entries beside the model's outputs, all [M].

    behavior_logprobs_M, advantage_M, weight_M: float32, weight 0 for padding. episode_M: int32 in 0..M-1, all entries of an episode contiguous and
    in these arrays. slot_M: int32 in 0..A-1, one slot per episode.
    """

    behavior_logprobs_M: jax.Array
    advantage_M: jax.Array
    weight_M: jax.Array
    episode_M: jax.Array
    slot_M: jax.Array


class LossMetrics(NamedTuple):
    """Sums per adapter slot, float32 [A]: a run's own, and additive over microbatches (add them with `jax.tree.map`). See `run_metrics`."""

    loss_A: jax.Array
    num_entries_A: jax.Array
    num_episodes_A: jax.Array
    ratio_A: jax.Array
    squared_log_ratio_A: jax.Array
    num_capped_A: jax.Array
    num_clipped_A: jax.Array
    num_masked_episodes_A: jax.Array
    entropy_A: jax.Array


class LossTerms(NamedTuple):
    """A loss per entry, and what its metrics count."""

    loss_M: jax.Array
    log_ratio_M: jax.Array
    is_capped_M: jax.Array
    is_clipped_M: jax.Array
    is_masked_M: jax.Array


def loss_table(specs: Mapping[int, LossSpec], num_slots: int) -> LossTable:
    """The settings of every slot as float32 [A]; slots without a run get the defaults. specs: by slot, 0 <= slot < num_slots."""
    rows = [specs.get(slot, LossSpec()) for slot in range(num_slots)]
    return LossTable(
        clip_low=np.array([s.clip_low for s in rows], np.float32),
        clip_high=np.array([s.clip_high for s in rows], np.float32),
        tis_cap=np.array([s.tis_cap for s in rows], np.float32),
        sequence_mask_c=np.array([s.sequence_mask_c for s in rows], np.float32),
    )


def cotangents(learner_logprobs_M: jax.Array, entropy_M: jax.Array, inputs: LossInputs, table: LossTable) -> tuple[jax.Array, LossMetrics]:
    """Gradient of each run's summed loss with respect to `learner_logprobs_M`, float32 [M], and the metrics' sums per slot.

    learner_logprobs_M, entropy_M: float32 [M], nats, at each entry's temperature. The proximal policy is the learner itself, at this step (one batch
    is one optimizer step), so the gradient of an entry is -weight * min(exp(learner - behavior), tis_cap) * advantage, or 0 where its episode is
    masked. Pure and jittable; no argument is static.
    """

    def summed(th_M: jax.Array) -> tuple[jax.Array, LossTerms]:
        terms = grpo_loss(th_M, jax.lax.stop_gradient(th_M), inputs, table)
        return terms.loss_M.sum(), terms

    cotangent_M, terms = jax.grad(summed, has_aux=True)(learner_logprobs_M.astype(jnp.float32))
    return cotangent_M, _metrics(terms, entropy_M.astype(jnp.float32), inputs, num_slots=len(table["tis_cap"]))


def grpo_loss(learner_logprobs_M: jax.Array, proximal_logprobs_M: jax.Array, inputs: LossInputs, table: LossTable) -> LossTerms:
    """Decoupled PPO with corrections for off-policy data, per entry: `-weight * w * min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)`.

    u = exp(learner - proximal) is the ratio that is clipped (Hilton et al. 2021, arXiv 2110.00641; asymmetric clip: DAPO, arXiv 2503.14476);
    w = min(exp(proximal - behavior), tis_cap) is the detached truncated importance weight of the token, and 0 for a whole episode whose geometric
    mean ratio exp(mean(proximal - behavior)) leaves [1 / c, c], c = sequence_mask_c, unless c is 0. Ratios are never multiplied twice: u corrects
    from the proximal policy, w from the behavior policy to it.

    proximal_logprobs_M: detached. Differentiable in learner_logprobs_M; the clip is a selection, so at its border the gradient is that of the open
    side, where `min` and `clip` would give half of it.
    """
    is_trained_M = inputs.weight_M != 0
    th_M = jnp.where(is_trained_M, learner_logprobs_M, 0.0)
    p_M = jax.lax.stop_gradient(jnp.where(is_trained_M, proximal_logprobs_M, 0.0))
    mu_M = jnp.where(is_trained_M, inputs.behavior_logprobs_M, 0.0)
    advantage_M = jnp.where(is_trained_M, inputs.advantage_M, 0.0)

    log_ratio_M = _clamp(p_M - mu_M)
    is_masked_M = _is_masked(log_ratio_M, is_trained_M, inputs.episode_M, table["sequence_mask_c"][inputs.slot_M])
    tis_cap_M = table["tis_cap"][inputs.slot_M]
    ratio_M = jnp.exp(log_ratio_M)

    u_M = jnp.exp(_clamp(th_M - p_M))
    highest_M = 1.0 + table["clip_high"][inputs.slot_M]
    lowest_M = 1.0 - table["clip_low"][inputs.slot_M]
    is_clipped_M = jnp.where(advantage_M >= 0, u_M > highest_M, u_M < lowest_M)
    surrogate_M = jnp.where(is_clipped_M, jnp.where(advantage_M >= 0, highest_M, lowest_M), u_M) * advantage_M

    loss_M = -inputs.weight_M * jnp.minimum(ratio_M, tis_cap_M) * surrogate_M
    return LossTerms(
        loss_M=jnp.where(is_trained_M & ~is_masked_M, loss_M, 0.0),
        log_ratio_M=log_ratio_M,
        is_capped_M=is_trained_M & (ratio_M > tis_cap_M),
        is_clipped_M=is_trained_M & is_clipped_M,
        is_masked_M=is_masked_M,
    )


def _is_masked(log_ratio_M: jax.Array, is_trained_M: jax.Array, episode_M: jax.Array, c_M: jax.Array) -> jax.Array:
    """Whether an entry's episode has a geometric mean ratio outside [1 / c, c]. A NaN mean masks nothing: it must surface."""
    sum_E = jax.ops.segment_sum(log_ratio_M, episode_M, num_segments=len(episode_M))
    count_E = jax.ops.segment_sum(is_trained_M.astype(jnp.float32), episode_M, num_segments=len(episode_M))
    mean_M = (sum_E / jnp.maximum(count_E, 1.0))[episode_M]
    is_on_M = c_M > 0
    return is_trained_M & is_on_M & (jnp.abs(mean_M) > jnp.log(jnp.where(is_on_M, c_M, 1.0)))


def _clamp(log_ratio_M: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _metrics(terms: LossTerms, entropy_M: jax.Array, inputs: LossInputs, *, num_slots: int) -> LossMetrics:
    is_trained_M = inputs.weight_M != 0
    # An episode is counted at its first entry: entries of an episode are contiguous.
    is_first_M = is_trained_M & jnp.concatenate([jnp.ones(1, bool), inputs.episode_M[1:] != inputs.episode_M[:-1]])

    def per_slot(value_M: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(jnp.where(is_trained_M, value_M, 0.0).astype(jnp.float32), inputs.slot_M, num_segments=num_slots)

    return LossMetrics(
        loss_A=per_slot(terms.loss_M),
        num_entries_A=per_slot(is_trained_M),
        num_episodes_A=per_slot(is_first_M),
        ratio_A=per_slot(jnp.exp(terms.log_ratio_M)),
        squared_log_ratio_A=per_slot(terms.log_ratio_M**2),
        num_capped_A=per_slot(terms.is_capped_M),
        num_clipped_A=per_slot(terms.is_clipped_M),
        num_masked_episodes_A=per_slot(terms.is_masked_M & is_first_M),
        entropy_A=per_slot(entropy_M),
    )


def run_metrics(sums: LossMetrics, slot: int) -> dict[str, float]:
    """A run's metrics from its summed microbatches, as plain numbers; means of nothing are 0.

    loss; num_entries; ratio_mean: of exp(learner - behavior); mismatch_kl: the k2 estimate mean((learner - behavior)^2) / 2, nats; capped_fraction
    and clipped_fraction: of entries; masked_episode_fraction: of episodes, by the geometric sequence mask; entropy_mean: nats.
    """
    num_entries = float(sums.num_entries_A[slot])
    entries, episodes = max(num_entries, 1.0), max(float(sums.num_episodes_A[slot]), 1.0)
    return {
        "loss": float(sums.loss_A[slot]),
        "num_entries": num_entries,
        "ratio_mean": float(sums.ratio_A[slot]) / entries,
        "mismatch_kl": float(sums.squared_log_ratio_A[slot]) / entries / 2,
        "capped_fraction": float(sums.num_capped_A[slot]) / entries,
        "clipped_fraction": float(sums.num_clipped_A[slot]) / entries,
        "masked_episode_fraction": float(sums.num_masked_episodes_A[slot]) / episodes,
        "entropy_mean": float(sums.entropy_A[slot]) / entries,
    }
