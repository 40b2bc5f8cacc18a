"""Corrections for data that another policy sampled, by staleness or by rounding: which tokens and sequences a policy loss drops.

Each mask is a pure function of detached log-probabilities, and says where entries are masked. Comparisons are written so that a NaN masks nothing: it
must surface in the loss. The truncated importance weight is not here: it is one `minimum` in the losses that have it (`rl/loss_terms.py`).

Shape letters: M entry, A adapter slot.
"""

from typing import Final

import jax
import jax.numpy as jnp

from noria.rl.sums import segment_sums

MAX_LOG_RATIO: Final = 20.0
"""exp(20) = 4.9e8 is far outside any trust region, and its square is finite in float32."""
_SQUARE_BITS: Final = 20
"""Squared log-ratios are at most 400, and compared to 2^-20."""


def clamp_log_ratio(log_ratio_M: jax.Array) -> jax.Array:
    """The log-ratio within +-20; a NaN stays one."""
    return jnp.clip(log_ratio_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_linear_proximal(th_M: jax.Array, mu_M: jax.Array, staleness_M: jax.Array, lag_M: jax.Array) -> jax.Array:
    """Log-probability of the policy `lag_M` versions behind the learner, without a forward pass: `mu + a (th - mu)`, detached by use.

    a = (v_proximal - v_behavior) / (v_learner - v_behavior), where v_proximal is v_learner - lag, but never older than the behavior policy
    (AReaL's `loglinear`). staleness_M = v_learner - v_behavior >= 0. Where the lag or the staleness is 0, it is th itself, bit for bit.
    """
    stale_M = staleness_M.astype(jnp.float32)
    fraction_M = jnp.maximum(stale_M - lag_M, 0.0) / jnp.maximum(stale_M, 1.0)
    return jnp.where((lag_M > 0) & (stale_M > 0), mu_M + fraction_M * (th_M - mu_M), th_M)


def geometric_mask(mean_log_ratio_M: jax.Array, log_c_M: jax.Array) -> jax.Array:
    """Entries of a sequence whose exp(mean(learner - behavior)) leaves [1 / c, c]. mean_log_ratio_M: of the entry's sequence. log_c_M: inf = off."""
    return jnp.abs(mean_log_ratio_M) > log_c_M


def icepop_mask(ratio_M: jax.Array, low_M: jax.Array, high_M: jax.Array) -> jax.Array:
    """Tokens whose ratio leaves [low, high] (IcePop, arXiv 2510.18855). Off: 0 and inf."""
    return (ratio_M < low_M) | (ratio_M > high_M)


def dppo_mask(th_M: jax.Array, mu_M: jax.Array, advantage_M: jax.Array, low_M: jax.Array, high_M: jax.Array) -> jax.Array:
    """Tokens that have gone far enough already where the advantage pushes them: exp(th) - exp(mu) > high and advantage > 0, or < -low and < 0
    (prime-rl's DPPO mask, thresholds 0.2). Off: inf."""
    moved_M = jnp.exp(jnp.minimum(th_M, 0.0)) - jnp.exp(jnp.minimum(mu_M, 0.0))
    return ((advantage_M > 0) & (moved_M > high_M)) | ((advantage_M < 0) & (moved_M < -low_M))


def second_moment_mask(log_ratio_M: jax.Array, is_counted_M: jax.Array, slot_M: jax.Array, cap_A: jax.Array) -> jax.Array:
    """Tokens with the largest (learner - behavior)^2 of their slot, as many as it takes for the mean of the slot's rest to be at most the slot's cap
    (M2PO, arXiv 2510.01161; 0.04 there).

    The scope is all counted entries of the slot in these arrays: for the paper's mask, the run's whole batch. cap_A: inf = off. Entries that are
    equal to 2^-20 are masked or kept together, so that no order matters. A NaN is neither counted nor masked.

    The mean of all squares up to a threshold grows with it, so the largest good threshold is found by bisection over its fixed-point digits, exactly,
    and not by a sort, whose running sums would depend on what stands before them.
    """
    squared_M = log_ratio_M**2
    is_in_M = is_counted_M & ~jnp.isnan(squared_M)
    fixed_M = jnp.round(jnp.where(is_in_M, squared_M, 0.0) * 2.0**_SQUARE_BITS).astype(jnp.int32)
    num_slots = len(cap_A)

    def search() -> jax.Array:
        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low_A, high_A = bounds
            middle_A = low_A + ((high_A - low_A + 1) >> 1)
            sum_A, count_A = segment_sums(squared_M, is_in_M & (fixed_M <= middle_A[slot_M]), slot_M, num_slots, fraction_bits=_SQUARE_BITS)
            is_good_A = sum_A / jnp.maximum(count_A, 1.0) <= cap_A
            return jnp.where(is_good_A, middle_A, low_A), jnp.where(is_good_A, high_A, middle_A - 1)

        largest = int(MAX_LOG_RATIO**2) << _SQUARE_BITS
        threshold_A: jax.Array = jax.lax.fori_loop(0, largest.bit_length(), halve, (jnp.full(num_slots, -1), jnp.full(num_slots, largest)))[0]
        return is_in_M & (fixed_M > threshold_A[slot_M])

    is_masked_M: jax.Array = jax.lax.cond(jnp.isfinite(cap_A).any(), search, lambda: jnp.zeros_like(is_in_M))
    return is_masked_M
