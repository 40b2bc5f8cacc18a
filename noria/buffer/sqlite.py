"""The embedded buffer: `protocols.Buffer` over SQLAlchemy Core, one transaction per call, on one writer thread.

Deliberately not here: batches (which groups train together), and the commit of an optimizer step. The service owns that commit: it runs a
function of its own through `transaction`, and that function calls `settle_trained` and `settle_dropped` beside writing the version.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, final

from sqlalchemy import Connection, Engine, Row
from sqlalchemy.exc import OperationalError

from noria.buffer import life
from noria.buffer.codec import decode_group
from noria.buffer.life import Counts, Cursor
from noria.buffer.tables import CURSORS, GROUPS, METADATA, TASK_FAILURES
from noria.errors import StateConflictError, StorageError
from noria.protocols import Clock, Lease, Outstanding
from noria.types import DropReason, EpisodeGroup

T = TypeVar("T")

NOT_WRITTEN = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")
"""SQLite's names for a disk that takes nothing."""


@dataclass(frozen=True, slots=True)
class SettledGroup:
    """A group at the end of its life. status: "trained" (by the step to trained_version), or "dropped" (for a reason)."""

    group: EpisodeGroup
    status: str
    reason: str | None
    trained_version: int | None


@final
class SqliteBuffer:
    """Satisfies `protocols.Buffer`.

    Owner of the database's writes: the buffer's one writer thread. Methods may be called from any event loop. Cancelling a call that has
    started does not undo its transaction: an admitted group that nobody heard of is dropped at its deadline, like any other.
    """

    def __init__(self, engine: Engine, clock: Clock, *, keep_payload: bool = False) -> None:
        """engine: from `open_database`; stays the caller's to dispose. keep_payload: keep the episodes of settled groups."""
        self._engine = engine
        self._clock = clock
        self._keep_payload = keep_payload
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="noria-buffer")
        METADATA.create_all(engine, tables=[GROUPS, CURSORS, TASK_FAILURES])

    def close(self) -> None:
        """Finish the transactions that were asked for, and end the writer thread. Idempotent."""
        self._writer.shutdown(wait=True)

    async def transaction(self, work: Callable[[Connection], T]) -> T:
        """The result of `work(connection)`, run on the writer thread in one transaction: committed if it returns, rolled back if it raises.

        Raises StorageError if the disk is full, or cannot be written.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._run, work)

    def _run(self, work: Callable[[Connection], T]) -> T:
        try:
            with self._engine.begin() as connection:
                return work(connection)
        except OperationalError as error:
            if getattr(error.orig, "sqlite_errorname", "").startswith(NOT_WRITTEN):
                raise StorageError(f"cannot write the state database: {error.orig}; free space there, or choose another folder") from error
            raise

    async def register_run(self, run_id: str, *, num_tasks: int, seed: int, num_places: int, task_tries: int = 3) -> None:
        """Give the run its cursor and its places. Idempotent: a known run keeps its cursor.

        num_tasks, num_places, task_tries >= 1. Raises StateConflictError if the run is known with another seed or number of tasks.
        """
        assert min(num_tasks, num_places, task_tries) >= 1
        cursor = Cursor(run_id, seed, num_tasks, num_places, task_tries, position=0, num_admitted=0, num_skipped=0)
        await self.transaction(lambda connection: life.register_run(connection, cursor))

    async def admit(self, run_id: str, *, version: int, deadline_s: float) -> Lease | None:
        """Take a place and the run's next task; None if no place is free.

        Raises StateConflictError for a run that is not registered, RunFailedError if all its tasks are quarantined.
        """
        return await self.transaction(lambda connection: life.admit(connection, run_id, version, deadline_s, self._clock.wall()))

    async def put(self, group: EpisodeGroup, *, drop: DropReason | None = None) -> bool:
        """admitted -> ready. False if the group was ready before, or is settled. drop: admitted -> dropped(drop) instead, recorded all the same.

        Raises RewardNotFiniteError, InvalidRequestError for a group that cannot be trained, StateConflictError for one that was never admitted.
        """
        life.validate(group)
        if drop is None:
            return await self.transaction(lambda connection: life.put(connection, group, self._clock.wall()))
        return await self.transaction(lambda connection: life.put_dropped(connection, group, drop, self._clock.wall(), self._keep_payload))

    async def drop(self, group_id: str, reason: DropReason) -> bool:
        """Settle without training and give the place back; False if the group was settled before. Raises StateConflictError for an unknown group.

        A group dropped as failed before it was ready counts against its task; task_tries of them quarantine it.
        """
        return await self.transaction(lambda connection: life.drop(connection, group_id, reason, self._clock.wall(), self._keep_payload))

    async def drop_run(self, run_id: str, reason: DropReason) -> int:
        """Drop every unsettled group of the run; their number."""
        return await self.transaction(lambda connection: life.drop_run(connection, run_id, reason, self._clock.wall(), self._keep_payload))

    async def outstanding(self, run_id: str) -> list[Outstanding]:
        """Groups that are admitted or ready, oldest admission first; groups past their deadline are dropped on the way."""
        return await self.transaction(lambda connection: life.outstanding(connection, run_id, self._clock.wall()))

    async def lease(self, run_id: str, group_ids: Sequence[str]) -> list[EpisodeGroup]:
        """ready -> leased, all or none, in the order asked. Raises StateConflictError if any is not a ready group of the run."""
        payloads = await self.transaction(lambda connection: life.lease(connection, run_id, group_ids))
        return [decode_group(payload) for payload in payloads]

    async def release(self, group_ids: Sequence[str]) -> int:
        """leased -> ready, for a step that was given up; the number of groups that were leased."""
        return await self.transaction(lambda connection: life.release(connection, group_ids))

    async def recover(self, run_id: str, *, version: int, deadline_s: float) -> list[Lease]:
        """After a restart, before anything else: leased groups are ready again, and the admitted ones are leased out anew.

        version: the run's published version now. The leases have the old group ids and tasks and the new deadline, so each group is still
        settled exactly once.
        """
        return await self.transaction(lambda connection: life.recover(connection, run_id, version, deadline_s))

    async def settled(self, run_id: str, *, trained_version: int | None = None) -> list[SettledGroup]:
        """The run's settled groups with their episodes, in admission order: for exports, and for the replay of a step.

        trained_version: of these, the groups that the step to this version trained. Groups that ended before their episodes were there (failed,
        past the deadline, stopped) are left out. Raises StateConflictError if the episodes of any were not kept.
        """
        rows = await self.transaction(lambda connection: life.settled(connection, run_id, trained_version))
        return await asyncio.get_running_loop().run_in_executor(self._writer, _with_episodes, run_id, rows)

    async def counts(self, run_id: str) -> Counts:
        """The run's counters. Raises StateConflictError for a run that is not registered."""
        return await self.transaction(lambda connection: life.count_groups(connection, run_id))

    def settle_trained(self, connection: Connection, group_ids: Sequence[str], version: int) -> None:
        """leased -> trained(version), inside the caller's transaction. Raises StateConflictError unless all are leased: nothing trains twice."""
        life.settle_trained(connection, group_ids, version, self._clock.wall(), self._keep_payload)

    def settle_dropped(self, connection: Connection, group_ids: Sequence[str], reason: DropReason) -> None:
        """leased -> dropped(reason), inside the caller's transaction. Raises StateConflictError unless all are leased."""
        life.settle_dropped(connection, group_ids, reason, self._clock.wall(), self._keep_payload)


def _with_episodes(run_id: str, rows: Sequence[Row[Any]]) -> list[SettledGroup]:
    played = [row for row in rows if row.ready_at_s is not None]
    missing = [row.group_id for row in played if row.payload is None]
    if missing:
        raise StateConflictError(
            f"the episodes of {len(missing)} settled groups of run {run_id!r} were not kept (the first is {missing[0]}): "
            "set keep_episodes = true in the server's configuration before a run starts"
        )
    return [SettledGroup(decode_group(row.payload), row.status, row.reason, row.trained_version) for row in played]
