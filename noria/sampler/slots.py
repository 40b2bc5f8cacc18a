"""Which adapter version lies in which slot of the sampler's stacked arrays, and who still needs it.

A version is resident while it is its run's newest, or a request, a prefill or a pin uses it; then its slot is free again. Slot 0 is the base.
This module deliberately holds no arrays: the runner writes the bytes.
"""

from dataclasses import dataclass
from typing import final

from noria.errors import SlotsExhaustedError, StateConflictError, UnknownVersionError

BASE_RUN = ""
"""The run id of the plain base: version 0, in slot 0, always there."""


@dataclass(slots=True)
class _Resident:
    slot: int
    num_users: int = 0


@final
class SlotTable:
    """Owner of the slot numbers. Touched by the device thread only."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, 0, -1))
        self._resident = {(BASE_RUN, 0): _Resident(0, num_users=1)}
        self._newest = {BASE_RUN: 0}

    @property
    def num_free(self) -> int:
        """Slots that hold no version anybody needs."""
        return len(self._free)

    def newest(self, run_id: str) -> int:
        """The run's newest published version. Raises UnknownVersionError if the run has none."""
        version = self._newest.get(run_id)
        if version is None:
            raise UnknownVersionError(f"run {run_id!r} has no published version yet: publish one before sampling")
        return version

    def slot(self, run_id: str, version: int) -> int:
        """The slot of a resident version. Raises UnknownVersionError if it is not resident."""
        return self._find(run_id, version).slot

    def acquire(self, run_id: str, version: int) -> None:
        """Keep a version resident until it is released. Raises UnknownVersionError if it is not resident, or its run has ended."""
        self.newest(run_id)
        self._find(run_id, version).num_users += 1

    def release(self, run_id: str, version: int) -> None:
        """Undo one `acquire`."""
        resident = self._find(run_id, version)
        assert resident.num_users > 0
        resident.num_users -= 1
        self._free_if_unused(run_id, version)

    def has_room(self, run_id: str) -> bool:
        """The run's next version can have a slot now: a free one, or that of its newest version if nobody needs it."""
        newest = self._newest.get(run_id)
        return bool(self._free) or (newest is not None and not self._resident[run_id, newest].num_users)

    def check_next(self, run_id: str, version: int) -> None:
        """Raises StateConflictError if `version` does not come after the run's newest, or a retired run of this name still has pinned versions;
        SlotsExhaustedError if there is no slot for it."""
        newest = self._newest.get(run_id)
        if newest is None and (pinned := sorted(number for run, number in self._resident if run == run_id)):
            raise StateConflictError(f"run {run_id!r}: cannot publish, a stopped run of this name has pinned versions {pinned}: unpin them")
        if version < 0 or (newest is not None and version <= newest):
            raise StateConflictError(
                f"run {run_id!r}: cannot publish version {version}, version {newest} is already published and a version never goes back"
            )
        if not self.has_room(run_id):
            in_use = ", ".join(f"{run or 'base'} v{number}" for run, number in self._resident)
            raise SlotsExhaustedError(
                f"no adapter slot is free for run {run_id!r} version {version}; in use: {in_use}; raise num_slots or stop a run"
            )

    def advance(self, run_id: str, version: int) -> int:
        """Make `version` the run's newest and return its slot, to be written before the next dispatch.

        Without a free slot the previous version's is reused, unless somebody still needs that version. Raises as `check_next` does.
        """
        self.check_next(run_id, version)
        previous = self._newest.pop(run_id, None)
        if previous is not None and not self._free:
            self._free_if_unused(run_id, previous)
        self._newest[run_id] = version
        slot = self._free.pop(0)
        self._resident[run_id, version] = _Resident(slot)
        if previous is not None:
            self._free_if_unused(run_id, previous)
        return slot

    def retire(self, run_id: str) -> None:
        """The run has ended: its newest version goes as soon as nobody uses it. Unknown runs are ignored."""
        version = self._newest.pop(run_id, None)
        if version is not None:
            self._free_if_unused(run_id, version)

    def _find(self, run_id: str, version: int) -> _Resident:
        resident = self._resident.get((run_id, version))
        if resident is None:
            kept = sorted(number for run, number in self._resident if run == run_id)
            raise UnknownVersionError(f"run {run_id!r} version {version} is not resident in the sampler; resident versions: {kept or 'none'}")
        return resident

    def _free_if_unused(self, run_id: str, version: int) -> None:
        resident = self._resident.get((run_id, version))
        if resident is not None and not resident.num_users and self._newest.get(run_id) != version:
            self._free.append(resident.slot)
            del self._resident[run_id, version]
