"""How fast the device is, as measured: what sizes a microbatch, and how many FLOPs a fair turn has. Plain Python."""

import math
from typing import Final, final

SHARE_OF_NEWEST: Final = 0.2
"""Of the newest measurement in the running mean: a dozen microbatches forget a slow one."""

VISITS_TO_COMPILE: Final = 3
"""Visits of walks that are not counted: the first of each kind compiles."""


@final
class Pace:
    """Measured seconds per position and per FLOP. Owned by the learner; touched by the device thread only.

    seen: sizes whose programs exist: the first pass of a size includes its compilation, and is not counted.
    """

    def __init__(self, max_stall_s: float, max_quantum_s: float) -> None:
        self._max_stall_s, self._max_quantum_s = max_stall_s, max_quantum_s
        self._seconds_per_position = self._seconds_per_flop = 0.0
        self._num_visits = 0
        self.seen: set[int] = set()

    def pulled(self, axis: int, num_positions: int, seconds: float, flops: float) -> None:
        """A backward pass that computed num_positions of an axis of so many, and the FLOPs that were charged for it."""
        if axis in self.seen:
            self._seconds_per_position = _mean(self._seconds_per_position, seconds / num_positions)
            self._seconds_per_flop = _mean(self._seconds_per_flop, seconds / flops)
        self.seen.add(axis)

    def visited(self, seconds: float, flops: float) -> None:
        """A visit of a walk."""
        self._num_visits += 1
        if self._num_visits > VISITS_TO_COMPILE:
            self._seconds_per_flop = _mean(self._seconds_per_flop, seconds / flops)

    def max_positions(self, largest: int) -> int:
        """Positions of a microbatch whose backward pass holds the device up for at most the promised time, at most `largest`."""
        return min(largest, int(self._max_stall_s / self._seconds_per_position)) if self._seconds_per_position else largest

    @property
    def quantum_flops(self) -> float:
        """FLOPs of a turn; infinite as long as nothing is known."""
        return self._max_quantum_s / self._seconds_per_flop if self._seconds_per_flop else math.inf


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - SHARE_OF_NEWEST) * old + SHARE_OF_NEWEST * new
