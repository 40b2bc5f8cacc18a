"""The adapter versions that the sampler knows, and which of them lie in slots of the device: slots are a cache of what host memory holds.

    advance ──▶ known: its run's newest, or needed by a request, a prefill or a pin ──▶ nobody can ask for it any more: forgotten
                    │ bring: a free slot, else that of the version that no plan has asked for longest
                    ▼
                in a slot ──▶ take_writes: the bytes that must move before the plan's dispatch ──▶ a later plan may take the slot

So a publish needs no slot and waits for none, and a version without a slot has one in the next dispatch that wants it. Slot 0 is the base, for good.
Deliberately no arrays here: what is to be written travels through unread, and the runner writes it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

from noria.errors import StateConflictError, UnknownVersionError

BASE_RUN = ""
"""The run id of the plain base: version 0, in slot 0, always there."""

Contents: TypeAlias = Any
"""A version's bytes as the publisher gave them, shared with it; unread here."""

_Key: TypeAlias = tuple[str, int]


class SlotWrite(NamedTuple):
    """A version that a slot must hold before the plan's dispatch."""

    slot: int
    run_id: str
    contents: Contents


@dataclass(slots=True)
class _Known:
    """A version in host memory. slot: where on the device, None: nowhere."""

    contents: Contents
    slot: int | None = None
    num_users: int = 0


@final
class SlotTable:
    """Owner of versions and slot numbers. Touched by the device thread only.

    Within one plan, which ends with `take_writes`, no slot is given to two versions: what `bring` has said stays true until its dispatch has run.
    """

    def __init__(self, num_slots: int) -> None:
        """num_slots: on the device, at least 2."""
        self._free = list(range(num_slots - 1, 0, -1))
        self._known = {(BASE_RUN, 0): _Known(None, slot=0, num_users=1)}
        self._newest = {BASE_RUN: 0}
        self._least_recent: dict[_Key, None] = {}  # versions in slots but the base, the one that no plan has asked for longest first
        self._planned: set[_Key] = set()
        self._leaving: list[int] = []  # slots of this plan whose versions were forgotten since: the dispatch still reads them
        self._writes: dict[_Key, SlotWrite] = {}

    # Versions

    @property
    def num_known(self) -> int:
        """Versions in host memory, the base aside."""
        return len(self._known) - 1

    @property
    def num_free(self) -> int:
        """Slots that hold no version anybody can ask for."""
        return len(self._free)

    def newest(self, run_id: str) -> int:
        """The run's newest published version. Raises UnknownVersionError if the run has none."""
        version = self._newest.get(run_id)
        if version is None:
            raise UnknownVersionError(f"run {run_id!r} has no published version yet: publish one before sampling")
        return version

    def acquire(self, run_id: str, version: int) -> None:
        """Keep a version until it is released: in host memory, not in a slot. Raises UnknownVersionError if it is not kept, or its run has ended."""
        self.newest(run_id)
        self._find(run_id, version).num_users += 1

    def release(self, run_id: str, version: int) -> None:
        """Undo one `acquire`."""
        known = self._find(run_id, version)
        assert known.num_users > 0
        known.num_users -= 1
        self._forget_if_unused(run_id, version)

    def advance(self, run_id: str, version: int, contents: Contents = None) -> None:
        """Make `version` the run's newest. contents: comes back from `take_writes`.

        Raises StateConflictError if `version` does not come after the run's newest, a retired run of this name still has pinned versions, or the run
        is the base.
        """
        if run_id == BASE_RUN:
            raise StateConflictError(f"cannot publish version {version} of run {BASE_RUN!r}, which is the plain base: name a run")
        newest = self._newest.get(run_id)
        if newest is None and (pinned := self._kept(run_id)):
            raise StateConflictError(f"run {run_id!r}: cannot publish, a stopped run of this name has pinned versions {pinned}: unpin them")
        if version < 0 or (newest is not None and version <= newest):
            raise StateConflictError(
                f"run {run_id!r}: cannot publish version {version}, version {newest} is already published and a version never goes back"
            )
        self._newest[run_id] = version
        self._known[run_id, version] = _Known(contents)
        if newest is not None:
            self._forget_if_unused(run_id, newest)

    def retire(self, run_id: str) -> None:
        """The run has ended: its newest version goes as soon as nobody uses it. Unknown runs are ignored, and so is the base."""
        version = self._newest.pop(run_id, None) if run_id != BASE_RUN else None
        if version is not None:
            self._forget_if_unused(run_id, version)

    # Slots

    def bring(self, run_id: str, version: int) -> bool:
        """Have a kept version in a slot for this plan's dispatch; `slot` then says which.

        False: every slot holds another version of this plan; ask again in the next one. Raises UnknownVersionError if it is not kept.
        """
        key = run_id, version
        known = self._find(run_id, version)
        if known.slot is None:
            if not self._free and (victim := next((other for other in self._least_recent if other not in self._planned), None)):
                self._free.append(self._leave_slot(*victim))
            if not self._free:
                return False
            known.slot = self._free.pop()
            self._writes[key] = SlotWrite(known.slot, run_id, known.contents)
        if known.slot:
            self._planned.add(key)
            self._least_recent.pop(key, None)
            self._least_recent[key] = None
        return True

    def slot(self, run_id: str, version: int) -> int:
        """The slot of a version that was brought in this plan."""
        slot = self._find(run_id, version).slot
        assert slot is not None, f"{run_id!r} v{version} was not brought in this plan"
        return slot

    def take_writes(self) -> list[SlotWrite]:
        """What the runner must write before the plan's dispatch. Ends the plan: the next `bring` belongs to another."""
        writes = list(self._writes.values())
        self._writes.clear()
        self._planned.clear()
        self._free += self._leaving
        self._leaving.clear()
        return writes

    def _find(self, run_id: str, version: int) -> _Known:
        known = self._known.get((run_id, version))
        if known is None:
            raise UnknownVersionError(
                f"run {run_id!r} version {version} is not kept in the sampler; kept are {self._kept(run_id) or 'none'}: name one of them, or pin a "
                "version before the next is published"
            )
        return known

    def _kept(self, run_id: str) -> list[int]:
        return sorted(version for run, version in self._known if run == run_id)

    def _forget_if_unused(self, run_id: str, version: int) -> None:
        known = self._known.get((run_id, version))
        if known is None or known.num_users or self._newest.get(run_id) == version:
            return
        if (run_id, version) in self._planned:
            self._leaving.append(self._leave_slot(run_id, version))
        elif known.slot is not None:
            self._free.append(self._leave_slot(run_id, version))
        del self._known[run_id, version]

    def _leave_slot(self, run_id: str, version: int) -> int:
        known = self._known[run_id, version]
        slot, known.slot = known.slot, None
        assert slot is not None
        del self._least_recent[run_id, version]
        return slot
