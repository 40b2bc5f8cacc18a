"""kill -9 at random moments: what was acknowledged is there, every step is whole, and each task is trained exactly once, in order.

Run as a script, this file is the process that is killed: it trains with batches of two groups and reports each commit.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select

from noria.buffer.cursor import task_at
from noria.buffer.database import open_database
from noria.buffer.sqlite import SqliteBuffer
from noria.buffer.tables import GROUPS
from noria.clock import RealClock
from noria.protocols import Lease
from noria.types import Completion, Episode, EpisodeGroup, Turn

METADATA = MetaData()
VERSIONS = Table("versions", METADATA, Column("version", Integer, primary_key=True))
"""Stands for the service's table, written in the transaction that settles the step's groups."""

BATCH, PLACES, TASKS, SEED = 2, 4, 1000, 5


def group_of(lease: Lease) -> EpisodeGroup:
    turn = Turn((1,) * 50, Completion((2,) * 50, (-0.5,) * 50, (lease.version,) * 50, "stop"), 1.0)
    return EpisodeGroup(lease.group_id, "r", lease.task, tuple(Episode(f"{lease.group_id}-{m}", m, (turn,), float(m)) for m in range(4)))


async def train(path: Path, until: int) -> None:
    engine = open_database(path)
    METADATA.create_all(engine)
    buffer = SqliteBuffer(engine, RealClock())
    await buffer.register_run("r", num_tasks=TASKS, seed=SEED, num_places=PLACES)
    with engine.connect() as connection:
        version = len(connection.execute(select(VERSIONS)).all())
    deadline_s = RealClock().wall() + 1000
    leases: list[Lease] = await buffer.recover("r", version=version, deadline_s=deadline_s)
    while version < until:
        while (lease := await buffer.admit("r", version=version, deadline_s=deadline_s)) is not None:
            leases.append(lease)
        for lease in leases:
            await buffer.put(group_of(lease))
        leases.clear()
        batch = [o.group_id for o in await buffer.outstanding("r") if o.is_ready][:BATCH]
        await buffer.lease("r", batch)

        def step(connection, version=version + 1, batch=batch) -> None:
            connection.execute(insert(VERSIONS).values(version=version))
            buffer.settle_trained(connection, batch, version)

        await buffer.transaction(step)
        version += 1
        sys.stdout.write(f"{version}\n")
        sys.stdout.flush()
    buffer.close()
    engine.dispose()


def train_and_kill(path: Path, after_s: float) -> int:
    """Start a training process, kill it some time after its first commit; the newest version it reported."""
    command = [sys.executable, __file__, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        reported = [int(process.stdout.readline())]
        killer = threading.Timer(after_s, process.send_signal, [signal.SIGKILL])
        killer.start()
        reported += [int(line) for line in process.stdout if line.endswith("\n")]
        killer.join()
    assert process.returncode == -signal.SIGKILL
    return reported[-1]


def check(path: Path, acknowledged: int) -> None:
    engine = open_database(path)
    with engine.connect() as connection:
        versions = connection.execute(select(VERSIONS.c.version).order_by(VERSIONS.c.version)).scalars().all()
        rows = connection.execute(select(GROUPS).order_by(GROUPS.c.admission)).all()
    engine.dispose()
    assert versions == list(range(1, len(versions) + 1))
    assert len(versions) >= acknowledged
    trained = [row for row in rows if row.status == "trained"]
    assert [row.trained_version for row in trained] == [v for v in versions for _ in range(BATCH)]
    assert [row.admission for row in rows] == list(range(len(rows)))
    assert [row.task_index for row in rows] == [task_at(p, num_tasks=TASKS, seed=SEED).index for p in range(len(rows))]
    assert [row.admission for row in trained] == list(range(len(trained)))
    assert sum(row.status in ("admitted", "ready", "leased") for row in rows) <= PLACES


@pytest.mark.parametrize("num_kills", [6, pytest.param(50, marks=pytest.mark.prove)])
def test_every_task_is_trained_exactly_once_whenever_the_process_is_killed(tmp_path, num_kills):
    path = tmp_path / "noria.db"
    rng = random.Random(num_kills)
    acknowledged = 0
    for _ in range(num_kills):
        acknowledged = train_and_kill(path, rng.uniform(0.0, 0.1))
        check(path, acknowledged)
    asyncio.run(train(path, until=acknowledged + 5))
    check(path, acknowledged + 5)


if __name__ == "__main__":
    asyncio.run(train(Path(sys.argv[1]), until=10**6))
