"""The life of a group, as plain functions on an open transaction:

    admitted ──▶ ready ──▶ leased ──▶ trained(version)
        └──────────┴─────────┴──────▶ dropped(reason)

Each function is called inside one transaction and leaves commit and rollback to its caller; none of them waits or reads a clock.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Row, case, func, insert, null, select, update

from noria.buffer.codec import encode_group
from noria.buffer.cursor import task_at
from noria.buffer.tables import ADMITTED, CURSORS, DROPPED, GROUPS, HOLDS_PLACE, LEASED, READY, TASK_FAILURES, TRAINED
from noria.errors import InvalidRequestError, RewardNotFiniteError, RunFailedError, StateConflictError
from noria.protocols import Lease, Outstanding
from noria.types import DropReason, EpisodeGroup, Task, Turn

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands in its endless order of tasks. Fields as in the table."""

    run_id: str
    seed: int
    num_tasks: int
    num_places: int
    task_tries: int
    position: int
    num_admitted: int
    num_skipped: int


@dataclass(frozen=True, slots=True)
class Counts:
    """A run's groups by status, its dropped groups by reason, its quarantined tasks, and the positions passed over because of them."""

    by_status: dict[str, int]
    by_reason: dict[str, int]
    num_quarantined: int
    num_skipped: int

    @property
    def places_in_use(self) -> int:
        """Groups between admission and settlement."""
        return sum(self.by_status.get(status, 0) for status in HOLDS_PLACE)


def register_run(connection: Connection, cursor: Cursor) -> None:
    """Write the run's cursor, or keep the one there is; its places and task tries follow the new configuration.

    Raises StateConflictError if the run exists with another seed or number of tasks: its order of tasks would change under its feet.
    """
    row = connection.execute(select(CURSORS.c.seed, CURSORS.c.num_tasks).where(CURSORS.c.run_id == cursor.run_id)).one_or_none()
    if row is None:
        connection.execute(insert(CURSORS).values(asdict(cursor)))
        return
    if (row.seed, row.num_tasks) != (cursor.seed, cursor.num_tasks):
        raise StateConflictError(
            f"run {cursor.run_id!r} was started with seed {row.seed} and {row.num_tasks} tasks, not {cursor.seed} and {cursor.num_tasks}; "
            "use the old values, or a new run name"
        )
    changed = update(CURSORS).where(CURSORS.c.run_id == cursor.run_id)
    connection.execute(changed.values(num_places=cursor.num_places, task_tries=cursor.task_tries))


def read_cursor(connection: Connection, run_id: str) -> Cursor:
    """The run's cursor. Raises StateConflictError for a run that was never registered."""
    row = connection.execute(select(CURSORS).where(CURSORS.c.run_id == run_id)).mappings().one_or_none()
    if row is None:
        raise StateConflictError(f"run {run_id!r} is not registered with the buffer")
    return Cursor(**row)


def admit(connection: Connection, run_id: str, version: int, deadline_s: float, now_s: float) -> Lease | None:
    """Insert the group of the run's next task as admitted and move the cursor; None if no place is free.

    Raises RunFailedError if every task of the run is quarantined.
    """
    cursor = read_cursor(connection, run_id)
    drop_expired(connection, run_id, now_s)
    in_use = select(func.count()).select_from(GROUPS).where(GROUPS.c.run_id == run_id, GROUPS.c.status.in_(HOLDS_PLACE))
    if connection.execute(in_use).scalar_one() >= cursor.num_places:
        return None
    task, position = _next_task(cursor, quarantined(connection, run_id, cursor.task_tries))
    connection.execute(
        update(CURSORS)
        .where(CURSORS.c.run_id == run_id)
        .values(position=position + 1, num_admitted=cursor.num_admitted + 1, num_skipped=cursor.num_skipped + position - cursor.position)
    )
    group_id = f"{run_id}-{cursor.num_admitted:06d}"
    connection.execute(
        insert(GROUPS).values(
            group_id=group_id,
            run_id=run_id,
            admission=cursor.num_admitted,
            task_index=task.index,
            task_seed=task.seed,
            status=ADMITTED,
            admitted_version=version,
            deadline_s=deadline_s,
            admitted_at_s=now_s,
        )
    )
    return Lease(group_id, run_id, task, cursor.num_admitted, version, deadline_s)


def quarantined(connection: Connection, run_id: str, task_tries: int) -> frozenset[int]:
    """Indices of the tasks that failed `task_tries` times or more."""
    rows = connection.execute(select(TASK_FAILURES.c.task_index).where(TASK_FAILURES.c.run_id == run_id, TASK_FAILURES.c.num_failed >= task_tries))
    return frozenset(rows.scalars())


def _next_task(cursor: Cursor, excluded: frozenset[int]) -> tuple[Task, int]:
    if len(excluded) >= cursor.num_tasks:
        raise RunFailedError(f"run {cursor.run_id!r}: all its {cursor.num_tasks} tasks are quarantined after {cursor.task_tries} failures each")
    position = cursor.position
    while (task := task_at(position, num_tasks=cursor.num_tasks, seed=cursor.seed)).index in excluded:
        position += 1
    return task, position


def put(connection: Connection, group: EpisodeGroup, now_s: float) -> bool:
    """admitted -> ready, with the payload; False if the group is past that. Raises StateConflictError for a group that was never admitted."""
    return _record(connection, group, {"status": READY, "ready_at_s": now_s, "payload": encode_group(group)})


def put_dropped(connection: Connection, group: EpisodeGroup, reason: DropReason, now_s: float, keep_payload: bool) -> bool:
    """admitted -> dropped(reason), recorded like a group that became ready, its payload only if it is kept. Otherwise as `put`."""
    payload = encode_group(group) if keep_payload else null()
    return _record(connection, group, {"status": DROPPED, "reason": reason, "ready_at_s": now_s, "settled_at_s": now_s, "payload": payload})


def _record(connection: Connection, group: EpisodeGroup, values: dict[str, Any]) -> bool:
    """Give an admitted group its new state, and the statistics of its episodes."""
    row = connection.execute(select(GROUPS).where(GROUPS.c.group_id == group.group_id)).one_or_none()
    if row is None:
        raise StateConflictError(f"group {group.group_id!r} was never admitted")
    if (row.run_id, row.task_index, row.task_seed) != (group.run_id, group.task.index, group.task.seed):
        raise StateConflictError(
            f"group {group.group_id!r} is task ({row.task_index}, {row.task_seed}) of run {row.run_id!r}, "
            f"but ({group.task.index}, {group.task.seed}) of run {group.run_id!r} was put"
        )
    if row.status != ADMITTED:
        return False
    connection.execute(
        update(GROUPS)
        .where(GROUPS.c.group_id == group.group_id)
        .values(
            oldest_version=group.oldest_version,
            num_episodes=len(group.episodes),
            num_failed=group.num_failed,
            num_sampled=sum(episode.num_sampled for episode in group.episodes),
            mean_reward=sum(episode.reward for episode in group.episodes) / len(group.episodes),
            **values,
        )
    )
    return True


def validate(group: EpisodeGroup) -> None:
    """Refuse a group that could poison a batch.

    Raises RewardNotFiniteError; InvalidRequestError for no episodes, repeated members or episode ids, a turn without sampled tokens, or that keeps
    more ids than there are, or is sampled after none, log-probabilities that are not finite, or an id or a version outside int32.
    """

    def refuse(what: str) -> InvalidRequestError:
        return InvalidRequestError(f"group {group.group_id!r}: {what}; the group was not stored")

    episodes = group.episodes
    if not episodes:
        raise refuse("it has no episodes")
    if len({e.member for e in episodes}) < len(episodes) or len({e.episode_id for e in episodes}) < len(episodes):
        raise refuse("two episodes have the same member number or the same id")
    for episode in episodes:
        if not math.isfinite(episode.reward):
            raise RewardNotFiniteError(f"episode {episode.episode_id!r} has reward {episode.reward}; it must be a finite number")
        if not episode.turns or not all(turn.completion.sampled_ids for turn in episode.turns):
            raise refuse(f"episode {episode.episode_id!r} has a turn without sampled tokens")
        if not all(math.isfinite(p) for turn in episode.turns for p in turn.completion.behavior_logprobs):
            raise refuse(f"episode {episode.episode_id!r} has a log-probability that is not finite")
        if not all(0 <= number <= MAX_INT32 for turn in episode.turns for number in _numbers(turn)):
            raise refuse(f"episode {episode.episode_id!r} has an id or a version outside [0, {MAX_INT32}]")
        if (problem := _misfork(episode.turns)) is not None:
            raise refuse(f"episode {episode.episode_id!r} {problem}")


def _numbers(turn: Turn) -> Iterator[int]:
    return chain(turn.observation_ids, turn.completion.sampled_ids, turn.completion.versions)


def _misfork(turns: Sequence[Turn]) -> str | None:
    """What is wrong with how the turns follow each other: each keeps part of the path so far, and is sampled after at least one id."""
    length = 0
    for number, turn in enumerate(turns):
        kept = length if turn.keep is None else turn.keep
        if not 0 <= kept <= length:
            return f"keeps {kept} ids of a path of {length} in turn {number}"
        if kept + len(turn.observation_ids) == 0:
            return f"has nothing before what was sampled in turn {number}"
        length = kept + len(turn.observation_ids) + len(turn.completion.sampled_ids)
    return None


def drop(connection: Connection, group_id: str, reason: DropReason, now_s: float, keep_payload: bool) -> bool:
    """Settle an unsettled group without training; False if it was settled before. A failure of an admitted group counts against its task."""
    row = connection.execute(select(GROUPS.c.run_id, GROUPS.c.task_index, GROUPS.c.status).where(GROUPS.c.group_id == group_id)).one_or_none()
    if row is None:
        raise StateConflictError(f"group {group_id!r} was never admitted")
    if row.status not in HOLDS_PLACE:
        return False
    connection.execute(update(GROUPS).where(GROUPS.c.group_id == group_id).values(status=DROPPED, reason=reason, **_settled(now_s, keep_payload)))
    if reason == "failed" and row.status == ADMITTED:
        _count_failure(connection, row.run_id, row.task_index)
    return True


def _count_failure(connection: Connection, run_id: str, task_index: int) -> None:
    of_task = (TASK_FAILURES.c.run_id == run_id, TASK_FAILURES.c.task_index == task_index)
    counted = connection.execute(update(TASK_FAILURES).where(*of_task).values(num_failed=TASK_FAILURES.c.num_failed + 1))
    if counted.rowcount == 0:
        connection.execute(insert(TASK_FAILURES).values(run_id=run_id, task_index=task_index, num_failed=1))


def drop_expired(connection: Connection, run_id: str, now_s: float) -> int:
    """Drop the run's admitted groups whose deadline has passed; their number."""
    late = update(GROUPS).where(GROUPS.c.run_id == run_id, GROUPS.c.status == ADMITTED, GROUPS.c.deadline_s <= now_s)
    return connection.execute(late.values(status=DROPPED, reason="deadline", settled_at_s=now_s)).rowcount


def drop_run(connection: Connection, run_id: str, reason: DropReason, now_s: float, keep_payload: bool) -> int:
    """Drop every unsettled group of the run; their number."""
    unsettled = update(GROUPS).where(GROUPS.c.run_id == run_id, GROUPS.c.status.in_(HOLDS_PLACE))
    return connection.execute(unsettled.values(status=DROPPED, reason=reason, **_settled(now_s, keep_payload))).rowcount


def lease(connection: Connection, run_id: str, group_ids: Sequence[str]) -> list[bytes]:
    """ready -> leased, all or none; the payloads in the order asked. Raises StateConflictError if any of them is not a ready group of the run."""
    rows = connection.execute(
        select(GROUPS.c.group_id, GROUPS.c.payload).where(GROUPS.c.group_id.in_(group_ids), GROUPS.c.run_id == run_id, GROUPS.c.status == READY)
    )
    payloads: dict[str, bytes] = {row.group_id: row.payload for row in rows}
    _require_all(group_ids, payloads, f"are not ready groups of run {run_id!r}; none was leased")
    connection.execute(update(GROUPS).where(GROUPS.c.group_id.in_(group_ids)).values(status=LEASED))
    return [payloads[group_id] for group_id in group_ids]


def release(connection: Connection, group_ids: Sequence[str]) -> int:
    """leased -> ready, for a step that was given up; the number of groups that were leased."""
    leased = update(GROUPS).where(GROUPS.c.group_id.in_(group_ids), GROUPS.c.status == LEASED)
    return connection.execute(leased.values(status=READY)).rowcount


def settle_trained(connection: Connection, group_ids: Sequence[str], version: int, now_s: float, keep_payload: bool) -> None:
    """leased -> trained(version). Raises StateConflictError, and changes nothing, unless all are leased: nothing trains twice."""
    _settle(connection, group_ids, {"status": TRAINED, "trained_version": version, **_settled(now_s, keep_payload)})


def settle_dropped(connection: Connection, group_ids: Sequence[str], reason: DropReason, now_s: float, keep_payload: bool) -> None:
    """leased -> dropped(reason), as `settle_trained`."""
    _settle(connection, group_ids, {"status": DROPPED, "reason": reason, **_settled(now_s, keep_payload)})


def settled(connection: Connection, run_id: str, trained_version: int | None) -> Sequence[Row[Any]]:
    """Rows of the run's trained and dropped groups in admission order; with trained_version, of those that its step trained."""
    chosen = select(GROUPS).where(GROUPS.c.run_id == run_id, GROUPS.c.status.in_((TRAINED, DROPPED)))
    if trained_version is not None:
        chosen = chosen.where(GROUPS.c.trained_version == trained_version)
    return connection.execute(chosen.order_by(GROUPS.c.admission)).all()


def _settle(connection: Connection, group_ids: Sequence[str], values: dict[str, Any]) -> None:
    leased = connection.execute(select(GROUPS.c.group_id).where(GROUPS.c.group_id.in_(group_ids), GROUPS.c.status == LEASED))
    _require_all(group_ids, set(leased.scalars()), "are not leased; nothing was settled")
    connection.execute(update(GROUPS).where(GROUPS.c.group_id.in_(group_ids)).values(values))


def _require_all(group_ids: Sequence[str], found: Iterable[str], complaint: str) -> None:
    missing = sorted(set(group_ids).difference(found))
    if missing:
        raise StateConflictError(f"groups {', '.join(missing)} {complaint}")
    if len(set(group_ids)) < len(group_ids):
        raise StateConflictError(f"a group is named twice among {', '.join(group_ids)}")


def _settled(now_s: float, keep_payload: bool) -> dict[str, Any]:
    return {"settled_at_s": now_s} if keep_payload else {"settled_at_s": now_s, "payload": null()}


def outstanding(connection: Connection, run_id: str, now_s: float) -> list[Outstanding]:
    """The run's admitted and ready groups, oldest admission first, after those past their deadline were dropped."""
    drop_expired(connection, run_id, now_s)
    oldest_version = func.coalesce(GROUPS.c.oldest_version, GROUPS.c.admitted_version)
    waiting = select(GROUPS.c.group_id, GROUPS.c.admission, oldest_version, GROUPS.c.status == READY).where(
        GROUPS.c.run_id == run_id, GROUPS.c.status.in_((ADMITTED, READY))
    )
    return [Outstanding(*row) for row in connection.execute(waiting.order_by(GROUPS.c.admission))]


def recover(connection: Connection, run_id: str, version: int, deadline_s: float) -> list[Lease]:
    """After a restart: leased groups are ready again; the admitted groups are leased out anew, oldest first, with the new deadline and version.

    Their actors died with the process, so no token of them exists and they start again at `version`.
    """
    of_run = update(GROUPS).where(GROUPS.c.run_id == run_id)
    connection.execute(of_run.where(GROUPS.c.status == LEASED).values(status=READY))
    connection.execute(of_run.where(GROUPS.c.status == ADMITTED).values(deadline_s=deadline_s, admitted_version=version))
    admitted = select(GROUPS).where(GROUPS.c.run_id == run_id, GROUPS.c.status == ADMITTED).order_by(GROUPS.c.admission)
    return [
        Lease(row.group_id, run_id, Task(row.task_index, row.task_seed), row.admission, row.admitted_version, row.deadline_s)
        for row in connection.execute(admitted)
    ]


def count_groups(connection: Connection, run_id: str) -> Counts:
    """The run's counters. Raises StateConflictError for a run that was never registered."""
    cursor = read_cursor(connection, run_id)
    is_dropped = GROUPS.c.status == DROPPED
    by_kind = select(GROUPS.c.status, case((is_dropped, GROUPS.c.reason), else_=null()).label("reason"), func.count().label("number"))
    rows = connection.execute(by_kind.where(GROUPS.c.run_id == run_id).group_by(GROUPS.c.status, GROUPS.c.reason)).all()
    by_status: dict[str, int] = {}
    for row in rows:
        by_status[row.status] = by_status.get(row.status, 0) + row.number
    by_reason = {row.reason: row.number for row in rows if row.status == DROPPED}
    return Counts(by_status, by_reason, len(quarantined(connection, run_id, cursor.task_tries)), cursor.num_skipped)
