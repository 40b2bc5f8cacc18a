"""Advantages and returns of an episode with a critic: generalized advantage estimation over its sampled tokens, turn after turn.

    turn 1: observation | a b c     turn 2: observation | d e     steps: a b c d e, and the value after c is that of d

A step is a sampled token. Observation tokens are no steps: the environment's answer is part of the transition from a turn's last token to the first
of the next, so neither discount nor trace counts them. Pure NumPy, float64 inside.

Shape letters: M sampled token of one episode, in order.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from noria.errors import RewardNotFiniteError
from noria.types import FloatArray

_BLOCK: Final = 64
"""Steps that one small matrix product serves; the loop in Python goes over blocks."""


def token_rewards(turn_lengths: Sequence[int], turn_rewards: Sequence[float]) -> FloatArray:
    """Each turn's reward at its last sampled token, float32 [M], zeros elsewhere.

    A turn in which nothing was sampled gives its reward to the last token before it; before the first token there is nothing to credit.
    Raises RewardNotFiniteError: a reward that is NaN or infinite.
    """
    if not np.isfinite(turn_rewards).all():
        raise RewardNotFiniteError(f"rewards {list(turn_rewards)} are not all finite; an episode with such a reward must be dropped, not trained")
    ends = np.cumsum(turn_lengths, dtype=np.int64)
    rewards_M = np.zeros(int(ends[-1]) if len(ends) else 0, np.float64)
    has_token = ends > 0
    np.add.at(rewards_M, ends[has_token] - 1, np.asarray(turn_rewards, np.float64)[has_token])
    return rewards_M.astype(np.float32)


def gae(
    values_M: npt.ArrayLike, rewards_M: npt.ArrayLike, *, gae_lambda: float = 0.95, gamma: float = 1.0, last_value: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Advantages and returns (targets of the critic), both float32 [M], of one episode (Schulman et al. 2016, arXiv 1506.02438).

        delta_m = reward_m + gamma * value_{m+1} - value_m,   advantage_m = delta_m + gamma * lambda * advantage_{m+1},   return = advantage + value

    values_M: the critic's, at the position that predicts each sampled token. rewards_M: see `token_rewards`; add `kl_rewards` for a penalty in the
    reward. gae_lambda, gamma in [0, 1]. last_value: after the last token, 0 if the episode ended there, the critic's value if it was cut.
    A NaN makes the episode's results NaN: it must surface.
    """
    values, rewards = np.asarray(values_M, np.float64), np.asarray(rewards_M, np.float64)
    assert values.shape == rewards.shape
    delta_M = rewards + gamma * np.append(values[1:], last_value)[: len(values)] - values
    advantages_M = _discounted_sums(delta_M, gamma * gae_lambda)
    return advantages_M.astype(np.float32), (advantages_M + values).astype(np.float32)


def _discounted_sums(x_M: npt.NDArray[np.float64], decay: float) -> npt.NDArray[np.float64]:
    """y_m = x_m + decay * y_{m+1}: within a block by the matrix of powers, from block to block by the carry."""
    num_blocks = -(-len(x_M) // _BLOCK)
    blocks = np.pad(x_M, (0, num_blocks * _BLOCK - len(x_M))).reshape(num_blocks, _BLOCK)
    distance = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))  # [from, to]: how far `to` lies before `from`
    powers = np.where(distance >= 0, decay ** np.maximum(distance, 0), 0.0)
    sums = blocks @ powers
    to_next = decay ** np.arange(_BLOCK, 0, -1)
    carry = 0.0
    for block in reversed(range(num_blocks)):
        sums[block] += to_next * carry
        carry = sums[block, 0]
    return sums.reshape(-1)[: len(x_M)]
