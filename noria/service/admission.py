"""A run's groups: admitted where there is a place, played, and put into the buffer as what they are.

    a place is free and a task is left ──▶ lease ──▶ actors play the group ──▶ ready
                                                                         └──▶ dropped (deadline, failed, stale; no_signal under "resample")

Under `zero_signal = "resample"` a group that has nothing to learn from is settled as soon as it is played, and its place admits another task. With
max_staleness = 0 a batch is therefore the first groups with signal in the order of admission, however long each took: a place is free only once a
group without signal is known to be one.
"""

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import final

from sqlalchemy import Connection, func, select

from noria.actors.group import GroupOutcome
from noria.buffer.tables import DROPPED, GROUPS, TRAINED
from noria.errors import DeadlineExceededError, RunFailedError
from noria.observe import log_event
from noria.protocols import Lease
from noria.rl.credit import has_signal
from noria.service.progress import RunState
from noria.types import DropReason, EpisodeGroup

log = logging.getLogger(__name__)


@final
class Admission:
    """Owner of what is known of the run's groups beside the buffer. `run` is one task, and each group's play another. Event loop only."""

    def __init__(self, state: RunState) -> None:
        self._state, self._stages = state, state.stages
        self._algorithm, self._actors, self._deadlines = state.config.algorithm, state.config.actors, state.config.deadlines
        self._recovered: deque[Lease] = deque()
        self._failures_in_a_row = 0
        self._without_signal: set[int] = set()

    def recover(self, leases: Sequence[Lease], without_signal: Sequence[int]) -> None:
        """What a restart found. leases: admitted groups, to be played anew. without_signal: admission numbers, see `read_without_signal`."""
        self._recovered.extend(leases)
        self._without_signal.update(without_signal)
        if self._algorithm.zero_signal == "resample":
            self._end_after_row(max(map(self._length_of_row, self._without_signal), default=0))

    async def run(self) -> None:
        """Admit groups and start to play them, for ever. Raises RunFailedError if no task is left."""
        state = self._state
        while True:
            seen = state.generation
            lease = await self._next_lease()
            if lease is None:
                with self._stages.spans.span("actor", "place", state.run_id, is_wait=True):
                    await state.change_since(seen)
                continue
            state.admitted((lease.group_id,))
            state.tasks.spawn(partial(self._play, lease))

    def group_deadline_s(self) -> float:
        """When a group that is admitted now is dropped unless it is ready: wall clock, Unix seconds."""
        return self._stages.clock.wall() + self._deadlines.episode_s * self._actors.episode_tries

    async def give_up(self, group_id: str, reason: DropReason, why: str) -> None:
        """Drop a group that did not become one. Raises RunFailedError if that happens too often in a row."""
        await self._stages.buffer.drop(group_id, reason)
        self._state.settled((group_id,))
        self._failures_in_a_row += 1
        log_event(log, logging.WARNING, "group dropped", run_id=self._state.run_id, group_id=group_id, reason=reason, error=why)
        limit = self._actors.max_failed_groups
        if self._failures_in_a_row >= limit:
            raise RunFailedError(f"run {self._state.run_id}: {limit} groups in a row failed; the last one with {why}")

    async def _next_lease(self) -> Lease | None:
        """A lease to play now: one that a restart recovered, or a new one if the run needs another group and has a place for it."""
        state = self._state
        if state.is_supervised or state.exhausted:
            return None
        if self._recovered:
            return self._recovered.popleft()
        async with state.admission:
            steps_left = state.config.num_steps - state.progress.version
            if state.exhausted or state.num_outstanding >= steps_left * self._algorithm.groups_per_batch:
                return None
            return await self._stages.buffer.admit(state.run_id, version=state.progress.version, deadline_s=self.group_deadline_s())

    async def _play(self, lease: Lease) -> None:
        try:
            outcome = await self._stages.pool.play_group(
                self._state.rules, lease, group_size=self._algorithm.group_size, episode_tries=self._actors.episode_tries
            )
        except DeadlineExceededError as error:
            await self.give_up(lease.group_id, "deadline", str(error))
        else:
            await self._settle_played(lease, outcome)
        self._state.change()

    async def _settle_played(self, lease: Lease, outcome: GroupOutcome) -> None:
        for failure in outcome.failures:
            log_event(log, logging.WARNING, "episode failed", run_id=self._state.run_id, code=failure.code, error=failure.message)
        if outcome.group is None:
            await self.give_up(lease.group_id, "failed", f"{outcome.failures[0].code}: {outcome.failures[0].message}")
        elif self._algorithm.zero_signal == "resample" and not has_signal(outcome.group, self._algorithm):
            await self._put_without_signal(lease, outcome.group)
        elif await self._stages.buffer.put(outcome.group):
            self._failures_in_a_row = 0
        else:
            self._state.settled((lease.group_id,))

    async def _put_without_signal(self, lease: Lease, group: EpisodeGroup) -> None:
        """Settle the group; the run should end early once too many in a row, in the order of admission, had no signal."""
        if await self._stages.buffer.put(group, drop="no_signal"):
            self._failures_in_a_row = 0
            self._without_signal.add(lease.admission)
        self._state.settled((lease.group_id,))
        self._end_after_row(self._length_of_row(lease.admission))

    def _end_after_row(self, length: int) -> None:
        """The run should end early if so many groups in a row, in the order of admission, were too many without signal."""
        limit = self._algorithm.max_batches_without_signal * self._algorithm.groups_per_batch
        if length >= limit:
            self._state.exhausted = f"stopped early: {limit} groups in a row had nothing to train: equal rewards, or episodes cut by max_tokens"

    def _length_of_row(self, admission: int) -> int:
        """How many groups without signal were admitted one after another, this one among them."""
        first = last = admission
        while first - 1 in self._without_signal:
            first -= 1
        while last + 1 in self._without_signal:
            last += 1
        return last - first + 1


def read_without_signal(connection: Connection, run_id: str) -> list[int]:
    """Admission numbers of the run's groups that were dropped for want of signal."""
    is_dull = (GROUPS.c.run_id == run_id) & (GROUPS.c.status == DROPPED) & (GROUPS.c.reason == "no_signal")
    return list(connection.execute(select(GROUPS.c.admission).where(is_dull)).scalars())


def read_newest_trained(connection: Connection, run_id: str) -> int:
    """The largest admission number of a group that the run has trained, -1 if there is none."""
    is_trained = (GROUPS.c.run_id == run_id) & (GROUPS.c.status == TRAINED)
    newest = connection.execute(select(func.max(GROUPS.c.admission)).where(is_trained)).scalar_one()
    return -1 if newest is None else int(newest)
