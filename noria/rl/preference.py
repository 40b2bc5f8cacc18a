"""Preference pairs: which episodes of a group are compared by a pairwise loss (`dpo`). Pure functions of the raw rewards.

A pair is trained as two sequences. An episode that stands in several pairs has its entries once for each of them: its positions are shared, as always
(design section 5), entries never are, so each pair keeps a gradient of its own. Deliberately not here: the loss (`rl/loss_terms.py`).

Shape letters: G group member.
"""

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from noria.errors import RewardNotFiniteError

PairRule: TypeAlias = Literal["best_worst", "all"]


class Pair(NamedTuple):
    """Two members of a group, by index: the one with the larger reward, and the other."""

    chosen: int
    rejected: int


def preference_pairs(rewards_G: npt.ArrayLike, rule: PairRule) -> list[Pair]:
    """The pairs of a group, in order of (chosen, rejected). rewards_G: raw rewards, finite.

    "best_worst": the best member against the worst, of equals the first. "all": every two members whose rewards differ. Members with equal rewards
    say nothing about each other: a group of equals, of one, or of none has no pair.

    Raises RewardNotFiniteError: a reward that is NaN or infinite.
    """
    values_G: npt.NDArray[np.float64] = np.asarray(rewards_G, np.float64)
    if not np.isfinite(values_G).all():
        raise RewardNotFiniteError(f"rewards {values_G.tolist()} are not all finite; an episode with such a reward must be dropped, not paired")
    if len(values_G) < 2 or (values_G == values_G[0]).all():
        return []
    if rule == "best_worst":
        return [Pair(int(np.argmax(values_G)), int(np.argmin(values_G)))]
    return [Pair(int(i), int(j)) for i, j in np.argwhere(values_G[:, None] > values_G[None, :])]
