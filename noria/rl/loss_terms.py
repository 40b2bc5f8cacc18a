"""The losses one by one: what an entry costs, and the derivative of that in closed form.

Every function here reads a `View`, the entries of all runs with each entry's own settings beside it, and returns `LossTerms` for all of them, of
which `rl/losses.py` takes those of the entries that are of this kind. Nothing is differentiated, so what a function makes of the entries of another
kind is never multiplied by anything: it is selected away.

The derivative is with respect to learner_logprobs. Detached are all other policies, the correction weights and masks, and cispo's and gspo's ratios.
A clip is a selection, so at its border the derivative is that of the open side, where `min` and `clip` would give half of it. A correction that drops
a token multiplies by 0 and is no selection: a NaN of a dropped token surfaces as well.

Shape letters: M entry, S pair.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from noria.rl.corrections import clamp_log_ratio
from noria.rl.sums import segment_sums


class View(NamedTuple):
    """What losses see of the entries, all [M]; float32 unless said. Zeros where an entry does not train.

    th_M, mu_M, proximal_M: learner, behavior and proximal log-probabilities; reference_M: with the adapter off. value_M: the critic's,
    behavior_value_M: the critic's before the step, return_M: its target. log_ratio_M: th - mu, clamped. mean_log_ratio_M: of the entry's sequence.
    importance_M: the correction weight of a loss that has no ratio of its own: min(exp(proximal - mu), tis_cap), or 1 if no correction weighs.
    keep_M: 0 where a correction drops the token, else 1. pair_M: int32; is_paired_M: the entry is of a loss that compares pairs.
    settings: of each entry's run, see `rl.losses.LossTable`.
    """

    th_M: jax.Array
    mu_M: jax.Array
    proximal_M: jax.Array
    reference_M: jax.Array
    advantage_M: jax.Array
    weight_M: jax.Array
    value_M: jax.Array
    behavior_value_M: jax.Array
    return_M: jax.Array
    log_ratio_M: jax.Array
    mean_log_ratio_M: jax.Array
    importance_M: jax.Array
    keep_M: jax.Array
    pair_M: jax.Array
    is_paired_M: jax.Array
    settings: Mapping[str, jax.Array]


class LossTerms(NamedTuple):
    """Per entry: the loss, its derivatives with respect to the learner's log-probability and to the critic's value, and what metrics count.

    is_capped_M: the importance weight met its cap; is_clipped_M: the ratio, or the value, was clipped; margin_M: of the entry's pair, nats.
    Zeros where a loss has none.
    """

    loss_M: jax.Array
    d_learner_logprobs_M: jax.Array
    d_value_M: jax.Array
    is_capped_M: jax.Array
    is_clipped_M: jax.Array
    is_value_clipped_M: jax.Array
    margin_M: jax.Array


def grpo_loss(view: View) -> LossTerms:
    """Decoupled PPO: `-weight * w * min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)`.

    u = exp(learner - proximal) is the ratio that is clipped (Hilton et al. 2021, arXiv 2110.00641; asymmetric clip: DAPO, arXiv 2503.14476); w is the
    detached correction from the behavior policy to the proximal one. Ratios are never multiplied twice. One batch is one optimizer step, so with
    proximal_lag 0 u is 1, and the derivative is -weight * min(exp(learner - behavior), tis_cap) * A, or 0 where a mask drops the token.
    """
    capped_M = jnp.exp(clamp_log_ratio(view.proximal_M - view.mu_M)) > view.settings["tis_cap"]
    return _clipped(view, jnp.exp(clamp_log_ratio(view.th_M - view.proximal_M)), view.importance_M * view.keep_M, capped_M)


def importance_sampling_loss(view: View) -> LossTerms:
    """`-weight * r * A`, r = exp(learner - behavior), at most tis_cap. Its derivative is -weight * min(r, tis_cap) * A."""
    ratio_M = jnp.exp(view.log_ratio_M)
    cap_M = view.settings["tis_cap"]
    loss_M = -(view.weight_M * (jnp.minimum(ratio_M, cap_M) * view.keep_M)) * view.advantage_M
    return _terms(loss_M, loss_M, is_capped_M=ratio_M > cap_M)


def ppo_loss(view: View) -> LossTerms:
    """`-weight * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, r = exp(learner - behavior) (Schulman et al. 2017, arXiv 1707.06347)."""
    return _clipped_with_own_ratio(view, jnp.exp(view.log_ratio_M))


def cispo_loss(view: View) -> LossTerms:
    """`-weight * clip(r, 1 - clip_low, 1 + clip_high) * A * learner`, r = exp(learner - behavior) detached (MiniMax-M1, arXiv 2506.13585)."""
    s, ratio_M = view.settings, jnp.exp(view.log_ratio_M)
    clipped_M = jnp.clip(ratio_M, s["ratio_low"], s["ratio_high"])
    slope_M = -(view.weight_M * (jnp.minimum(clipped_M, s["tis_cap"]) * view.keep_M)) * view.advantage_M
    return _terms(slope_M * view.th_M, slope_M, is_capped_M=clipped_M > s["tis_cap"], is_clipped_M=clipped_M != ratio_M)


def dro_loss(view: View) -> LossTerms:
    """`-weight * w * (learner * A - beta / 2 * (learner - behavior)^2)` (Richemond et al. 2024, arXiv 2405.19107); w: the correction, 1 if none."""
    beta_M, x_M = view.settings["beta"], view.log_ratio_M
    scale_M = -(view.weight_M * (view.importance_M * view.keep_M))
    loss_M = scale_M * (view.th_M * view.advantage_M - 0.5 * beta_M * x_M**2)
    return _terms(loss_M, scale_M * (view.advantage_M - beta_M * x_M), is_capped_M=jnp.exp(x_M) > view.settings["tis_cap"])


def gspo_loss(view: View) -> LossTerms:
    """PPO's clip on the ratio of the sequence, exp(mean(learner - behavior)), token by token: GSPO-token (arXiv 2507.18071, section 4.3).

    The ratio is exp(mean + learner - detached learner), so a token's derivative is that of its own log-probability alone.
    """
    return _clipped_with_own_ratio(view, jnp.exp(view.mean_log_ratio_M))


def ppo_critic_loss(view: View) -> LossTerms:
    """PPO with a critic: `ppo`, and `weight * value_coeff * max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)`, c = value_clip (0: not clipped).

    v: the critic's value now, v_old: before the step, R: the return (`rl/returns.py`).
    """
    policy, bound_M = ppo_loss(view), view.settings["value_clip"]
    error_M = view.value_M - view.return_M
    moved_M = jnp.where(bound_M > 0, view.value_M - view.behavior_value_M, 0.0)
    clipped_error_M = error_M + (jnp.clip(moved_M, -bound_M, bound_M) - moved_M)
    worse_M = jnp.maximum(jnp.abs(error_M), jnp.abs(clipped_error_M))
    scale_M = view.weight_M * view.settings["value_coeff"]
    d_value_M = 2.0 * scale_M * jnp.where(worse_M == jnp.abs(error_M), error_M, 0.0 * worse_M)  # a NaN stays one
    is_clipped_M = worse_M > jnp.abs(error_M)
    return policy._replace(loss_M=policy.loss_M + scale_M * worse_M**2, d_value_M=d_value_M, is_value_clipped_M=is_clipped_M)


def cross_entropy_loss(view: View) -> LossTerms:
    """Maximum likelihood: `-weight * A * learner`, where the advantage is the token's own weight, of either sign. It knows no other policy."""
    slope_M = jnp.where(jnp.isnan(view.th_M), jnp.nan, -view.weight_M * view.advantage_M)  # else it would not show what the model has become
    return _terms(slope_M * view.th_M, slope_M)


def linear_loss(view: View) -> LossTerms:
    """A derivative that the caller computed: `weight * A * learner`, where the advantage is the derivative, with weight 1 passed on bit for bit."""
    given_M = jnp.where(view.weight_M == 1, view.advantage_M, view.weight_M * view.advantage_M)  # a product flushes denormals
    slope_M = jnp.where(jnp.isnan(view.th_M), jnp.nan, given_M)
    return _terms(slope_M * view.th_M, slope_M)


def dpo_loss(view: View) -> LossTerms:
    """`-weight * log sigmoid(margin)`, margin = beta * (sum over chosen - sum over rejected of (learner - reference)) (arXiv 2305.18290).

    The entries of a pair share pair_M; their advantage is 1 in the chosen sequence and -1 in the rejected one, their weight the pair's, on each of
    them. Log-ratios are clamped to +-20 per token. The pair's loss is spread evenly over its entries, so that sums over entries are sums over pairs.
    """
    beta_M, side_M = view.settings["beta"], jnp.sign(view.advantage_M)
    part_M = side_M * clamp_log_ratio(view.th_M - view.reference_M)
    sum_S, count_S = segment_sums(part_M, view.is_paired_M, view.pair_M, len(view.pair_M))
    margin_M = beta_M * sum_S[view.pair_M]
    share_M = view.weight_M / jnp.maximum(count_S[view.pair_M], 1.0)
    return _terms(share_M * jax.nn.softplus(-margin_M), -(view.weight_M * beta_M) * jax.nn.sigmoid(-margin_M) * side_M, margin_M=margin_M)


def _clipped_with_own_ratio(view: View, ratio_M: jax.Array) -> LossTerms:
    """PPO's clip of a ratio to the behavior policy, which truncation may not multiply again: it lowers the ratio to tis_cap."""
    cap_M = view.settings["tis_cap"]
    return _clipped(view, ratio_M, jnp.minimum(1.0, cap_M / ratio_M) * view.keep_M, ratio_M > cap_M)


def _clipped(view: View, ratio_M: jax.Array, factor_M: jax.Array, is_capped_M: jax.Array) -> LossTerms:
    """`-weight * factor * min(ratio A, clip(ratio) A)`, whose derivative with respect to learner_logprobs is that of ratio = exp(learner - ...)."""
    is_gain_M = view.advantage_M >= 0
    bound_M = jnp.where(is_gain_M, view.settings["ratio_high"], view.settings["ratio_low"])
    is_clipped_M = jnp.where(is_gain_M, ratio_M > bound_M, ratio_M < bound_M)
    scale_M = -(view.weight_M * factor_M) * view.advantage_M
    slope_M = scale_M * jnp.where(is_clipped_M, 0.0, ratio_M)
    return _terms(scale_M * jnp.where(is_clipped_M, bound_M, ratio_M), slope_M, is_capped_M=is_capped_M, is_clipped_M=is_clipped_M)


def _terms(
    loss_M: jax.Array,
    d_learner_logprobs_M: jax.Array,
    *,
    is_capped_M: jax.Array | None = None,
    is_clipped_M: jax.Array | None = None,
    margin_M: jax.Array | None = None,
) -> LossTerms:
    zeros_M, nowhere_M = jnp.zeros_like(loss_M), jnp.zeros(loss_M.shape, bool)
    return LossTerms(
        loss_M=loss_M,
        d_learner_logprobs_M=d_learner_logprobs_M,
        d_value_M=zeros_M,
        is_capped_M=nowhere_M if is_capped_M is None else is_capped_M,
        is_clipped_M=nowhere_M if is_clipped_M is None else is_clipped_M,
        is_value_clipped_M=nowhere_M,
        margin_M=zeros_M if margin_M is None else margin_M,
    )
