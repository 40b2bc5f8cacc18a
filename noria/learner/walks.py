"""Walks that are under way: one has its path on the device, those of other runs wait with theirs in host memory, as far as the settings allow.

So a run with a long context does not wait for the end of another's walk, only for its turn; and device memory holds one path, whoever walks.
"""

from typing import final

from noria.config import LearnerConfig
from noria.learner.executors import Job, Walk
from noria.learner.memory import MIB, path_bytes, walk_blocks
from noria.model.config import ModelConfig
from noria.rl.packing import MicrobatchShape


@final
class Walks:
    """Owner of the learner's walks. The device thread only. shape: of their chunks."""

    def __init__(self, config: ModelConfig, settings: LearnerConfig, shape: MicrobatchShape) -> None:
        parked = 2 * path_bytes(config, walk_blocks(settings.path_positions, shape))
        self._most = 1 + settings.host_mib * MIB // parked
        self._walks: dict[str, Walk] = {}
        self._present: Walk | None = None

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._walks

    @property
    def present(self) -> str | None:
        """The run whose path is on the device."""
        return None if self._present is None else self._present.run_id

    @property
    def halfway(self) -> Walk | None:
        """The walk whose visit is half done: the next dispatch is its other half."""
        return self._present if self._present is not None and self._present.is_halfway else None

    @property
    def has_room(self) -> bool:
        """Whether one more may begin."""
        return len(self._walks) < self._most

    def begin(self, walk: Walk) -> Walk:
        """A new walk, which has the device from now on."""
        assert self.has_room
        self._walks[walk.run_id] = walk
        return self._enter(walk)

    def resume(self, run_id: str, job: Job) -> Walk | None:
        """The job's walk, which has the device from now on. None if there is none."""
        walk = self._walks.get(run_id)
        if walk is None:
            return None
        assert walk.job is job, "a run's walks follow each other"
        return self._enter(walk)

    def end(self, run_id: str) -> None:
        """The run's walk is done, or given up. Nothing if it has none."""
        walk = self._walks.pop(run_id, None)
        if walk is self._present:
            self._present = None

    def clear(self) -> None:
        """Give all up."""
        self._walks.clear()
        self._present = None

    def _enter(self, walk: Walk) -> Walk:
        if self._present is not None and self._present is not walk:
            self._present.park()
        self._present = walk
        return walk
