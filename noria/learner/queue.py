"""Fair order of runs that want the learner: start-time fair queueing over the positions a run has had (plain Python, no jax).

Each run has a virtual time, its trained positions divided by its weight; the run that is furthest behind goes first. A run that was idle
starts at the time of the least served active run, so that idling earns no credit. (Goyal, Vin and Cheng 1996.)
"""

from collections.abc import Iterable
from typing import final


@final
class FairOrder:
    """Virtual times of runs. Owned by the learner; touched by the device thread only."""

    def __init__(self) -> None:
        self._time: dict[str, float] = {}
        self._weight: dict[str, float] = {}
        self._active: set[str] = set()
        self._floor = 0.0

    def activate(self, run_id: str, weight: float) -> None:
        """The run has work. weight > 0: its fair share relative to others."""
        assert weight > 0, "a fair share is positive"
        self._weight[run_id] = weight
        if run_id not in self._active:
            self._time[run_id] = max(self._time.get(run_id, 0.0), self._current())
            self._active.add(run_id)

    def deactivate(self, run_id: str) -> None:
        """The run has no work for now; what it has had is remembered."""
        self._floor = self._current()
        self._active.discard(run_id)

    def forget(self, run_id: str) -> None:
        """The run is gone."""
        self.deactivate(run_id)
        self._time.pop(run_id, None)
        self._weight.pop(run_id, None)

    def charge(self, run_id: str, positions: int) -> None:
        """The run has had `positions` of the learner."""
        self._time[run_id] += positions / self._weight[run_id]

    def order(self, run_ids: Iterable[str]) -> list[str]:
        """The given active runs, the one that is furthest behind first; ties by name, so that the order is reproducible."""
        return sorted(run_ids, key=lambda run_id: (self._time[run_id], run_id))

    def _current(self) -> float:
        return min((self._time[run_id] for run_id in self._active), default=self._floor)
