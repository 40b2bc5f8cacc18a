"""Advantages of a group: how much better each episode did than the others of its task.

Computed once, in one place (`rl/tree.py` calls it), from the raw rewards of all episodes of the group, before any filter. Deliberately knows
nothing of tokens, masks or losses.

Shape letters: G group member.
"""

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from noria.errors import RewardNotFiniteError
from noria.types import FloatArray

AdvantageKind: TypeAlias = Literal["mean", "mean_std", "leave_one_out"]

STD_FLOOR = 1e-6
"""Added to the standard deviation, as verl does: small against any spread a reward means to have, large against rounding."""


def group_advantages(rewards_G: npt.ArrayLike, kind: AdvantageKind) -> FloatArray:
    """Advantage of each episode of one group, float32 [G], computed in float64.

    rewards_G: raw rewards [G], finite; G may be 0 or 1. kind, with r the rewards and n = G:
        mean            r - mean(r)                                   (Dr. GRPO, arXiv 2503.20783)
        mean_std        (r - mean(r)) / (std(r) + 1e-6), ddof 1       (GRPO, arXiv 2402.03300, with the usual sample deviation)
        leave_one_out   r - mean of the others = (r - mean(r)) n / (n - 1)    (RLOO, arXiv 2402.14740)
    Equal rewards, and a group of one, give exactly 0 and never noise / noise; |mean_std| < sqrt(n) always.

    Raises RewardNotFiniteError: a reward that is NaN or infinite, or rewards so far apart that their difference is.
    """
    values_G = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(values_G).all():
        raise RewardNotFiniteError(f"rewards {values_G.tolist()} are not all finite; an episode with such a reward must be dropped, not trained")
    if len(values_G) < 2 or (values_G == values_G[0]).all():
        return np.zeros(len(values_G), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        advantages_G = _centred(values_G, kind).astype(np.float32)
    if not np.isfinite(advantages_G).all():
        raise RewardNotFiniteError(f"rewards {values_G.tolist()} are too far apart for 32-bit advantages; scale them down")
    return advantages_G


def _centred(values_G: npt.NDArray[np.float64], kind: AdvantageKind) -> npt.NDArray[np.float64]:
    centred_G = values_G - values_G.mean()
    if kind == "mean":
        return centred_G
    if kind == "leave_one_out":
        return centred_G * (len(values_G) / (len(values_G) - 1))
    largest = float(np.abs(centred_G).max())  # taken out, so that the squares of huge rewards stay finite
    return centred_G / (largest * float((centred_G / largest).std(ddof=1)) + STD_FLOOR)
