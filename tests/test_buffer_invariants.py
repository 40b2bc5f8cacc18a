"""Random lives of many groups against a model in plain dictionaries, with restarts: places, leases and settlements hold after every move."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import select

from noria.buffer.database import open_database
from noria.buffer.sqlite import SqliteBuffer
from noria.buffer.tables import GROUPS, HOLDS_PLACE
from noria.clock import VirtualClock
from noria.errors import StateConflictError
from noria.types import Completion, Episode, EpisodeGroup, Task, Turn

RUN = "r"
TIMEOUT_S = 50.0


def group_of(group_id: str, task: Task, version: int) -> EpisodeGroup:
    turn = Turn((1,), Completion((2,), (-0.5,), (version,), "stop"), 1.0)
    return EpisodeGroup(group_id, RUN, task, (Episode(f"{group_id}-0", 0, (turn,), 1.0),))


class GroupLives(RuleBasedStateMachine):
    """`status` is the model: what every group's state must be. `settled` counts the settlements of each group that were reported to us."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = VirtualClock()
        self.status: dict[str, str] = {}
        self.tasks: dict[str, Task] = {}
        self.deadline: dict[str, float] = {}
        self.settled: dict[str, int] = {}
        self.version = 0

    @initialize(num_places=st.integers(1, 5), num_tasks=st.integers(1, 6))
    def start(self, num_places: int, num_tasks: int) -> None:
        self.num_places, self.num_tasks = num_places, num_tasks
        self.open()

    def open(self) -> None:
        self.engine = open_database(self.folder / "noria.db")
        self.buffer = SqliteBuffer(self.engine, self.clock)
        self.run(self.buffer.register_run(RUN, num_tasks=self.num_tasks, seed=3, num_places=self.num_places, task_tries=10**6))

    def run(self, coroutine):
        return self.clock.run(coroutine)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        self.buffer.close()
        self.engine.dispose()

    def expire(self) -> None:
        for group_id, status in self.status.items():
            if status == "admitted" and self.deadline[group_id] <= self.clock.wall():
                self.settle(group_id, "dropped")

    def settle(self, group_id: str, status: str) -> None:
        self.status[group_id] = status
        self.settled[group_id] = self.settled.get(group_id, 0) + 1

    def pick(self, data, *statuses: str) -> str:
        return data.draw(st.sampled_from([g for g, status in self.status.items() if status in (statuses or (status,))]))

    @rule()
    def admit(self) -> None:
        self.expire()
        lease = self.run(self.buffer.admit(RUN, version=self.version, deadline_s=self.clock.wall() + TIMEOUT_S))
        in_use = sum(status in HOLDS_PLACE for status in self.status.values())
        assert (lease is None) == (in_use >= self.num_places)
        if lease is not None:
            assert lease.admission == len(self.status)
            self.status[lease.group_id], self.tasks[lease.group_id], self.deadline[lease.group_id] = "admitted", lease.task, lease.deadline_s

    @precondition(lambda self: self.status)
    @rule(data=st.data(), drop=st.sampled_from([None, None, "no_signal"]))
    def put(self, data, drop: str | None) -> None:
        group_id = self.pick(data)
        stored = self.run(self.buffer.put(group_of(group_id, self.tasks[group_id], self.version), drop=drop))
        assert stored == (self.status[group_id] == "admitted")
        if stored and drop:
            self.settle(group_id, "dropped")
        elif stored:
            self.status[group_id] = "ready"

    @precondition(lambda self: self.status)
    @rule(data=st.data(), reason=st.sampled_from(["failed", "stopped", "no_signal"]))
    def drop(self, data, reason: str) -> None:
        group_id = self.pick(data)
        dropped = self.run(self.buffer.drop(group_id, reason))
        assert dropped == (self.status[group_id] in HOLDS_PLACE)
        if dropped:
            self.settle(group_id, "dropped")

    @precondition(lambda self: self.status)
    @rule(data=st.data())
    def lease(self, data) -> None:
        wanted = data.draw(st.lists(st.sampled_from(list(self.status)), min_size=1, max_size=3, unique=True))
        if all(self.status[g] == "ready" for g in wanted):
            assert [g.group_id for g in self.run(self.buffer.lease(RUN, wanted))] == wanted
            self.status |= dict.fromkeys(wanted, "leased")
        else:
            with pytest.raises(StateConflictError):
                self.run(self.buffer.lease(RUN, wanted))

    @precondition(lambda self: self.status)
    @rule(data=st.data(), is_trained=st.booleans())
    def step(self, data, is_trained: bool) -> None:
        leased = [g for g, status in self.status.items() if status == "leased"]
        wanted = leased or data.draw(st.lists(st.sampled_from(list(self.status)), min_size=1, max_size=2, unique=True))

        def commit(connection) -> None:
            if is_trained:
                self.buffer.settle_trained(connection, wanted, self.version + 1)
            else:
                self.buffer.settle_dropped(connection, wanted, "no_signal")

        if not leased:
            with pytest.raises(StateConflictError):
                self.run(self.buffer.transaction(commit))
            return
        self.run(self.buffer.transaction(commit))
        self.version += is_trained
        for group_id in wanted:
            self.settle(group_id, "trained" if is_trained else "dropped")

    @rule(seconds=st.sampled_from([1.0, 30.0, TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def look(self) -> None:
        self.expire()
        shown = {o.group_id: o.is_ready for o in self.run(self.buffer.outstanding(RUN))}
        assert shown == {g: s == "ready" for g, s in self.status.items() if s in ("admitted", "ready")}

    @rule()
    def restart(self) -> None:
        self.close()
        self.open()
        leases = self.run(self.buffer.recover(RUN, version=self.version, deadline_s=self.clock.wall() + TIMEOUT_S))
        assert {lease.group_id: lease.task for lease in leases} == {g: self.tasks[g] for g, s in self.status.items() if s == "admitted"}
        self.deadline |= {lease.group_id: lease.deadline_s for lease in leases}
        self.status |= {g: "ready" for g, s in self.status.items() if s == "leased"}

    @invariant()
    def the_store_agrees(self) -> None:
        if not hasattr(self, "buffer"):
            return
        with self.engine.connect() as connection:
            stored = {row.group_id: row.status for row in connection.execute(select(GROUPS.c.group_id, GROUPS.c.status))}
        assert stored == self.status
        assert sum(status in HOLDS_PLACE for status in stored.values()) <= self.num_places
        assert set(self.settled.values()) <= {1}


GroupLives.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
test_random_lives_keep_every_promise = GroupLives.TestCase
