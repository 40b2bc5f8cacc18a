"""The divergence from the reference policy (the base: adapter off): as a penalty in the loss, or in the reward.

Every form here has the gradient of KL(learner || reference), which differentiating the estimators would not give: the derivative of k1 has mean zero,
that of k3 is the gradient of KL(reference || learner) (Tang & Munos 2025, arXiv 2506.09477). With x = learner - reference of a sampled token, the
estimator x of the gradient's factor, `x * grad learner`, is unbiased: it is the score-function gradient of k1, the derivative of k2, and the sum of
both parts for k3. So the estimators differ in what they report, and not in what they train.

In a loss the penalty is that of the token given its prefix; that a token also changes what comes after it, only the reward form weighs.

Shape letters: M entry, G group member.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from noria.rl.corrections import MAX_LOG_RATIO
from noria.types import FloatArray, KlEstimator

KL_ESTIMATORS: Final[Mapping[KlEstimator, int]] = {"k1": 0, "k2": 1, "k3": 2}
"""Numbers of the estimators in a loss table."""


def kl_estimate(log_ratio_M: jax.Array, estimator_M: jax.Array) -> jax.Array:
    """Per-token estimate of KL(learner || reference), nats; its gradient's factor is log_ratio_M itself (see above).

    log_ratio_M: learner - reference, clamped. estimator_M: see KL_ESTIMATORS. With x the log-ratio (Schulman 2020, "Approximating KL divergence"):
        k1   x                    unbiased, of either sign
        k2   x^2 / 2              biased, >= 0, low variance
        k3   exp(-x) - 1 + x      unbiased, >= 0
    """
    return jax.lax.select_n(estimator_M, log_ratio_M, log_ratio_M**2 / 2, jnp.maximum(jnp.expm1(-log_ratio_M) + log_ratio_M, 0.0))


def kl_rewards(behavior_logprobs_M: npt.ArrayLike, reference_logprobs_M: npt.ArrayLike, coeff: float) -> FloatArray:
    """The penalty as a reward of each sampled token: -coeff * (behavior - reference), log-ratios clamped to +-20; float32 [M].

    For a critic's returns (`rl/returns.py`). A NaN stays one.
    """
    log_ratio_M = np.asarray(behavior_logprobs_M, np.float64) - np.asarray(reference_logprobs_M, np.float64)
    return (-coeff * np.clip(log_ratio_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)).astype(np.float32)


def rewards_with_kl(rewards_G: npt.ArrayLike, penalties_G: Sequence[npt.ArrayLike]) -> npt.NDArray[np.float64]:
    """A group's rewards, each with the sum of its tokens' `kl_rewards`, float64 [G]: what `group_advantages` then takes.

    With them, the policy gradient is that of E[reward] - coeff * KL over whole sequences (Stiennon et al. 2020, arXiv 2009.01325). An episode without
    tokens has an empty array.
    """
    sums_G = [float(np.asarray(penalty_M, np.float64).sum()) for penalty_M in penalties_G]
    return np.asarray(rewards_G, np.float64) + np.array(sums_G, np.float64)
