"""Single transitions of a group's life, and who is refused."""

import math
from dataclasses import replace

import pytest
from sqlalchemy import select

from noria.buffer.cursor import task_at
from noria.buffer.database import open_database
from noria.buffer.sqlite import SqliteBuffer
from noria.buffer.tables import GROUPS
from noria.clock import VirtualClock
from noria.errors import InvalidRequestError, RewardNotFiniteError, RunFailedError, StateConflictError
from noria.protocols import Buffer, Lease
from noria.types import Completion, Episode, EpisodeGroup, Turn


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def engine(tmp_path):
    engine = open_database(tmp_path / "state" / "noria.db")
    yield engine
    engine.dispose()


@pytest.fixture
def buffer(engine, clock):
    buffer = SqliteBuffer(engine, clock)
    clock.run(buffer.register_run("r", num_tasks=10, seed=0, num_places=3, task_tries=2))
    yield buffer
    buffer.close()


def episode(member: int = 0, *, reward: float = 1.0, versions: tuple[int, ...] = (0, 1), logprob: float = -0.5) -> Episode:
    n = len(versions)
    return Episode(f"e{member}", member, (Turn((5, 6), Completion((7,) * n, (logprob,) * n, versions, "stop"), 1.0),), reward)


def group_of(lease: Lease, *episodes: Episode) -> EpisodeGroup:
    return EpisodeGroup(lease.group_id, lease.run_id, lease.task, episodes or (episode(0), episode(1, reward=0.0)))


def admit(clock: VirtualClock, buffer: Buffer, *, version: int = 0, timeout_s: float = 100) -> Lease:
    lease = clock.run(buffer.admit("r", version=version, deadline_s=clock.wall() + timeout_s))
    assert lease is not None
    return lease


def row(engine, group_id: str):
    with engine.connect() as connection:
        return connection.execute(select(GROUPS).where(GROUPS.c.group_id == group_id)).one()


def test_the_buffer_satisfies_its_protocol(buffer):
    seam: Buffer = buffer
    assert seam is buffer


def test_a_group_goes_round_once(clock, buffer, engine):
    lease = admit(clock, buffer, version=1)
    group = group_of(lease)
    assert clock.run(buffer.put(group))
    assert clock.run(buffer.lease("r", [lease.group_id])) == [group]
    clock.run(buffer.transaction(lambda connection: buffer.settle_trained(connection, [lease.group_id], 2)))
    settled = row(engine, lease.group_id)
    assert (settled.status, settled.trained_version, settled.oldest_version, settled.mean_reward) == ("trained", 2, 0, 0.5)
    assert clock.run(buffer.counts("r")).places_in_use == 0


def test_no_more_groups_than_places(clock, buffer):
    leases = [admit(clock, buffer) for _ in range(3)]
    assert clock.run(buffer.admit("r", version=0, deadline_s=clock.wall() + 9)) is None
    clock.run(buffer.put(group_of(leases[0])))
    assert clock.run(buffer.admit("r", version=0, deadline_s=clock.wall() + 9)) is None
    clock.run(buffer.drop(leases[1].group_id, "failed"))
    assert admit(clock, buffer).admission == 3


def test_two_runs_do_not_share_places_or_order(clock, buffer):
    clock.run(buffer.register_run("other", num_tasks=10, seed=0, num_places=1))
    for _ in range(3):
        admit(clock, buffer)
    other = clock.run(buffer.admit("other", version=0, deadline_s=clock.wall() + 9))
    assert (other.admission, other.run_id) == (0, "other")


def test_putting_twice_stores_once(clock, buffer):
    lease = admit(clock, buffer)
    first, second = group_of(lease), group_of(lease, episode(0, reward=9.0), episode(1))
    assert clock.run(buffer.put(first))
    assert not clock.run(buffer.put(second))
    assert clock.run(buffer.lease("r", [lease.group_id])) == [first]


def test_a_group_past_its_deadline_is_dropped_and_its_late_result_refused(clock, buffer, engine):
    lease = admit(clock, buffer, timeout_s=10)
    ready = admit(clock, buffer, timeout_s=10)
    clock.run(buffer.put(group_of(ready)))
    clock.advance(11)
    assert [o.group_id for o in clock.run(buffer.outstanding("r"))] == [ready.group_id]
    assert not clock.run(buffer.put(group_of(lease)))
    assert row(engine, lease.group_id).reason == "deadline"


def test_an_expired_group_gives_its_place_back_to_the_next_admission(clock, buffer):
    for _ in range(3):
        admit(clock, buffer, timeout_s=10)
    clock.advance(11)
    assert admit(clock, buffer).admission == 3


def test_outstanding_shows_the_oldest_version_of_the_tokens_once_ready(clock, buffer):
    first, second = admit(clock, buffer, version=4), admit(clock, buffer, version=5)
    clock.run(buffer.put(group_of(second, episode(0, versions=(7, 6)), episode(1, versions=(8,)))))
    shown = [(o.group_id, o.admission, o.oldest_version, o.is_ready) for o in clock.run(buffer.outstanding("r"))]
    assert shown == [(first.group_id, 0, 4, False), (second.group_id, 1, 6, True)]


def test_leases_are_all_or_none_and_in_the_order_asked(clock, buffer):
    leases = [admit(clock, buffer) for _ in range(3)]
    for lease in leases[:2]:
        clock.run(buffer.put(group_of(lease)))
    ids = [lease.group_id for lease in leases]
    for bad in (ids, [ids[0], ids[0]], [ids[0], "unknown"]):
        with pytest.raises(StateConflictError):
            clock.run(buffer.lease("r", bad))
    with pytest.raises(StateConflictError):
        clock.run(buffer.lease("other", ids[:1]))
    assert [g.group_id for g in clock.run(buffer.lease("r", [ids[1], ids[0]]))] == [ids[1], ids[0]]


def test_a_failed_settlement_rolls_the_whole_step_back(clock, buffer, engine):
    leases = [admit(clock, buffer) for _ in range(2)]
    for lease in leases:
        clock.run(buffer.put(group_of(lease)))
    clock.run(buffer.lease("r", [leases[0].group_id]))

    def step(connection):
        buffer.settle_trained(connection, [leases[0].group_id], 1)
        buffer.settle_dropped(connection, [leases[1].group_id], "no_signal")

    with pytest.raises(StateConflictError, match="not leased"):
        clock.run(buffer.transaction(step))
    assert [row(engine, lease.group_id).status for lease in leases] == ["leased", "ready"]


def test_a_trained_group_cannot_be_settled_again(clock, buffer):
    lease = admit(clock, buffer)
    clock.run(buffer.put(group_of(lease)))
    clock.run(buffer.lease("r", [lease.group_id]))
    clock.run(buffer.transaction(lambda connection: buffer.settle_trained(connection, [lease.group_id], 1)))
    for settle in (lambda c: buffer.settle_trained(c, [lease.group_id], 2), lambda c: buffer.settle_dropped(c, [lease.group_id], "stale")):
        with pytest.raises(StateConflictError):
            clock.run(buffer.transaction(settle))
    assert not clock.run(buffer.drop(lease.group_id, "stopped"))


@pytest.mark.parametrize("keep_payload", [False, True])
def test_the_episodes_of_a_settled_group_are_kept_only_when_asked_for(clock, engine, keep_payload):
    buffer = SqliteBuffer(engine, clock, keep_payload=keep_payload)
    clock.run(buffer.register_run("r", num_tasks=5, seed=0, num_places=3))
    trained, dropped = admit(clock, buffer), admit(clock, buffer)
    for lease in (trained, dropped):
        clock.run(buffer.put(group_of(lease)))
    clock.run(buffer.lease("r", [trained.group_id]))
    clock.run(buffer.transaction(lambda connection: buffer.settle_trained(connection, [trained.group_id], 1)))
    clock.run(buffer.drop_run("r", "stopped"))
    buffer.close()
    assert [(row(engine, lease.group_id).payload is not None) for lease in (trained, dropped)] == [keep_payload, keep_payload]


def test_a_task_that_keeps_failing_is_quarantined_and_skipped(clock, buffer):
    bad = admit(clock, buffer).task.index
    clock.run(buffer.drop("r-000000", "failed"))
    seen = []
    for _ in range(40):
        lease = admit(clock, buffer)
        seen.append(lease.task.index)
        clock.run(buffer.drop(lease.group_id, "failed" if lease.task.index == bad else "no_signal"))
    counts = clock.run(buffer.counts("r"))
    assert seen.count(bad) == 1
    assert (counts.num_quarantined, counts.by_reason) == (1, {"failed": 2, "no_signal": 39})
    order = [task_at(p, num_tasks=10, seed=0).index for p in range(60)]
    second_failure = order.index(bad, 10)
    assert seen == (order[1 : second_failure + 1] + [index for index in order[second_failure + 1 :] if index != bad])[:40]
    assert counts.num_skipped >= 2


def test_failures_after_the_episodes_are_in_do_not_count_against_the_task(clock, buffer):
    for _ in range(30):
        lease = admit(clock, buffer)
        clock.run(buffer.put(group_of(lease)))
        clock.run(buffer.drop(lease.group_id, "failed"))
    assert clock.run(buffer.counts("r")).num_quarantined == 0


def test_a_run_whose_tasks_are_all_quarantined_fails_by_name(clock, buffer):
    for _ in range(20):
        clock.run(buffer.drop(admit(clock, buffer).group_id, "failed"))
    with pytest.raises(RunFailedError, match="'r': all its 10 tasks are quarantined"):
        admit(clock, buffer)


def test_a_resumed_run_goes_on_where_it_stopped(clock, engine, buffer):
    straight = [admit(clock, buffer).task for _ in range(3)]
    buffer.close()
    again = SqliteBuffer(engine, clock)
    clock.run(again.register_run("r", num_tasks=10, seed=0, num_places=6))
    clock.run(again.drop_run("r", "stopped"))
    rest = [admit(clock, again) for _ in range(6)]
    again.close()
    assert [lease.admission for lease in rest] == list(range(3, 9))
    assert len({t.index for t in straight} | {lease.task.index for lease in rest}) == 9


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_tasks": 11}])
def test_a_run_cannot_change_its_order_of_tasks(clock, buffer, change):
    with pytest.raises(StateConflictError, match="was started with seed 0 and 10 tasks"):
        clock.run(buffer.register_run("r", **{"num_tasks": 10, "seed": 0, "num_places": 3, **change}))


def test_recovery_leases_admitted_groups_anew_and_makes_leased_ones_ready(clock, buffer):
    first, second, third = (admit(clock, buffer, timeout_s=10) for _ in range(3))
    for lease in (second, third):
        clock.run(buffer.put(group_of(lease)))
    clock.run(buffer.lease("r", [second.group_id, third.group_id]))
    clock.advance(1000)
    deadline_s = clock.wall() + 60
    assert clock.run(buffer.recover("r", version=3, deadline_s=deadline_s)) == [replace(first, version=3, deadline_s=deadline_s)]
    assert [o.is_ready for o in clock.run(buffer.outstanding("r"))] == [False, True, True]
    assert clock.run(buffer.put(group_of(first)))


def test_a_given_up_step_releases_its_groups(clock, buffer):
    lease = admit(clock, buffer)
    clock.run(buffer.put(group_of(lease)))
    clock.run(buffer.lease("r", [lease.group_id]))
    assert clock.run(buffer.release([lease.group_id])) == 1
    assert len(clock.run(buffer.lease("r", [lease.group_id]))) == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_and_the_group_stays_admitted(clock, buffer, engine, reward):
    lease = admit(clock, buffer)
    with pytest.raises(RewardNotFiniteError):
        clock.run(buffer.put(group_of(lease, episode(0, reward=reward), episode(1))))
    assert row(engine, lease.group_id).status == "admitted"


@pytest.mark.parametrize(
    "episodes",
    [
        (episode(0), episode(0)),
        (replace(episode(0), turns=()), episode(1)),
        (episode(0, versions=()), episode(1)),
        (episode(0, logprob=math.nan), episode(1)),
        (episode(0, versions=(-1,)), episode(1)),
        (episode(0, versions=(2**31,)), episode(1)),
    ],
)
def test_a_group_that_cannot_be_trained_is_refused(clock, buffer, episodes):
    with pytest.raises(InvalidRequestError, match="was not stored"):
        clock.run(buffer.put(group_of(admit(clock, buffer), *episodes)))


def forks(*keeps: int | None, observed: tuple[int, ...] = (5, 6)) -> Episode:
    """Turns of two observed and one sampled id that keep so many ids each."""
    turns = tuple(Turn(observed if k == 0 else (), Completion((7,), (-0.5,), (0,), "stop"), 1.0, keep) for k, keep in enumerate(keeps))
    return Episode("e0", 0, turns, 1.0)


def test_a_group_that_forked_comes_back_with_its_forks(clock, buffer):
    lease = admit(clock, buffer)
    group = group_of(lease, forks(None, 1, 1, None), episode(1))
    assert group.episodes[0].paths == ((5, 6, 7), (5, 7), (5, 7, 7))
    assert clock.run(buffer.put(group))
    assert clock.run(buffer.lease("r", [lease.group_id])) == [group]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (forks(None, 4), "keeps 4 ids of a path of 3 in turn 1"),
        (forks(None, 1, 3), "keeps 3 ids of a path of 2 in turn 2"),
        (forks(1), "keeps 1 ids of a path of 0 in turn 0"),
        (forks(None, -1), "keeps -1 ids of a path of 3"),
        (forks(None, 0), "nothing before what was sampled in turn 1"),
        (forks(None, observed=()), "nothing before what was sampled in turn 0"),
    ],
)
def test_a_fork_outside_its_path_is_refused(clock, buffer, broken, message):
    with pytest.raises(InvalidRequestError, match=message):
        clock.run(buffer.put(group_of(admit(clock, buffer), broken, episode(1))))


def test_ids_that_a_fork_left_behind_are_checked_too(clock, buffer):
    behind = replace(forks(None, 1).turns[0], completion=Completion((2**31,), (-0.5,), (0,), "stop"))
    broken = replace(forks(None, 1), turns=(behind, forks(None, 1).turns[1]))
    with pytest.raises(InvalidRequestError, match="outside"):
        clock.run(buffer.put(group_of(admit(clock, buffer), broken, episode(1))))


def test_a_group_put_to_be_dropped_is_recorded_settled_and_frees_its_place(clock, buffer, engine):
    leases = [admit(clock, buffer) for _ in range(3)]
    assert clock.run(buffer.admit("r", version=0, deadline_s=clock.wall() + 9)) is None
    group = group_of(leases[0])
    assert clock.run(buffer.put(group, drop="no_signal"))
    stored = row(engine, group.group_id)
    assert (stored.status, stored.reason, stored.num_episodes, stored.mean_reward, stored.oldest_version) == ("dropped", "no_signal", 2, 0.5, 0)
    assert stored.num_sampled == 4
    assert stored.settled_at_s == stored.ready_at_s == clock.wall()
    assert stored.payload is None, "not kept unless asked"
    assert admit(clock, buffer).admission == 3
    for reason in (None, "no_signal", "failed"):
        assert not clock.run(buffer.put(group, drop=reason)), "settled once"
    assert clock.run(buffer.counts("r")).by_reason == {"no_signal": 1}
    with pytest.raises(StateConflictError, match="never admitted"):
        clock.run(buffer.put(replace(group, group_id="r-9"), drop="no_signal"))


def test_a_ready_group_is_not_dropped_by_a_late_put(clock, buffer, engine):
    lease = admit(clock, buffer)
    assert clock.run(buffer.put(group_of(lease)))
    assert not clock.run(buffer.put(group_of(lease), drop="no_signal"))
    assert row(engine, lease.group_id).status == "ready"


def test_settled_groups_are_read_back_in_admission_order(clock, engine):
    buffer = SqliteBuffer(engine, clock, keep_payload=True)
    clock.run(buffer.register_run("r", num_tasks=10, seed=0, num_places=6))
    leases = [admit(clock, buffer) for _ in range(6)]
    groups = [group_of(lease, episode(0, reward=float(lease.admission)), forks(None, 1)) for lease in leases]
    groups = [replace(g, episodes=(g.episodes[0], replace(g.episodes[1], episode_id="e1", member=1))) for g in groups]
    ids = [lease.group_id for lease in leases]
    for group in groups[1:4]:
        clock.run(buffer.put(group))
    clock.run(buffer.lease("r", ids[1:4]))
    clock.run(buffer.transaction(lambda c: (buffer.settle_trained(c, [ids[3]], 1), buffer.settle_trained(c, [ids[2], ids[1]], 2))))
    clock.run(buffer.put(groups[0], drop="no_signal"))
    clock.run(buffer.drop(ids[5], "failed"))
    shown = [(s.group, s.status, s.reason, s.trained_version) for s in clock.run(buffer.settled("r"))]
    assert shown == [
        (groups[0], "dropped", "no_signal", None),
        (groups[1], "trained", None, 2),
        (groups[2], "trained", None, 2),
        (groups[3], "trained", None, 1),
    ], "not the one that is still admitted, nor the one that was never played"
    assert [s.group for s in clock.run(buffer.settled("r", trained_version=2))] == groups[1:3]
    assert clock.run(buffer.settled("r", trained_version=9)) == clock.run(buffer.settled("other")) == []
    buffer.close()


def test_settled_groups_whose_episodes_were_not_kept_are_an_error_that_names_the_setting(clock, buffer):
    lease = admit(clock, buffer)
    clock.run(buffer.put(group_of(lease), drop="no_signal"))
    with pytest.raises(StateConflictError, match=r"1 settled groups of run 'r' were not kept \(the first is r-000000\).*keep_episodes = true"):
        clock.run(buffer.settled("r"))


def test_a_group_without_episodes_is_refused(clock, buffer):
    with pytest.raises(InvalidRequestError, match="no episodes"):
        clock.run(buffer.put(replace(group_of(admit(clock, buffer)), episodes=())))


def test_a_group_that_was_never_admitted_is_refused(clock, buffer):
    lease = admit(clock, buffer)
    for group in (
        replace(group_of(lease), group_id="r-9"),
        replace(group_of(lease), run_id="x"),
        replace(group_of(lease), task=replace(lease.task, seed=1)),
    ):
        with pytest.raises(StateConflictError):
            clock.run(buffer.put(group))
    with pytest.raises(StateConflictError):
        clock.run(buffer.drop("r-9", "failed"))
    with pytest.raises(StateConflictError, match="not registered"):
        clock.run(buffer.admit("x", version=0, deadline_s=0))


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "noria.db").write_text("not a database " * 100)
    with pytest.raises(StateConflictError, match=r"noria\.db"):
        open_database(tmp_path / "noria.db")


def test_a_reader_does_not_hold_the_writer_up(clock, buffer, engine):
    with engine.connect().execution_options(sqlite_begin="DEFERRED") as reader:
        reader.execute(select(GROUPS)).all()
        admit(clock, buffer)
        assert reader.execute(select(GROUPS)).all() == []


def test_commits_are_flushed_to_disk(engine):
    with engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous", "foreign_keys")]
    assert pragmas == ["wal", 2, 1]
