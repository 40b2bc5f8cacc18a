"""kill -9 at random moments, then resume: every group is settled and every due version evaluated once, no (run, version) names two contents."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select
from tool_builders import SERVER_FILE

from noria.adapters.versions import VersionFiles
from noria.buffer.codec import decode_group
from noria.buffer.database import open_database
from noria.buffer.tables import GROUPS
from noria.service import store

RUN = """
name = "{name}"
tenant = "{name}"
base = "tiny"
seed = {seed}

[environment]
name = "letters.py:Letters"

[algorithm]
steps = {steps}
group_size = 3
groups_per_batch = 2
max_staleness = {staleness}
truncated = "keep"

[adapter]
rank = 4

[sampling]
max_tokens = 3

[evaluation]
num_tasks = 4
every = {every}
"""

ENVIRONMENT = '''
import asyncio
from noria.envs.single_turn import SingleTurn

class Letters(SingleTurn):
    """Rewarded for low bytes; slow enough that a kill finds episodes at every stage, and evaluations under way."""

    def problem(self, rng):
        return "".join(rng.choice("abcdefgh") for _ in range(6)), ""

    async def reset(self, task):
        await asyncio.sleep(0.4 if task.index >= self.num_tasks else 0.0)
        return SingleTurn.reset(self, task)

    async def step(self, action):
        await asyncio.sleep(0.01)
        return SingleTurn.step(self, action)

    def reward(self, action, answer):
        return sum(byte < 100 for byte in action.encode()) / max(1, len(action.encode()))
'''

EVERY = 5
SETTLED = ("trained", "dropped")


def due(steps):
    """The versions that must be evaluated."""
    return (*range(0, steps, EVERY), steps)


def num_committed(state_dir: Path) -> int:
    """Versions of all runs."""
    try:
        with closing(sqlite3.connect(f"file:{state_dir / 'noria.sqlite'}?mode=ro", uri=True)) as database:
            return database.execute("SELECT count(*) FROM versions").fetchone()[0]
    except sqlite3.OperationalError:  # there is none yet
        return 0


def snapshot(state_dir: Path):
    """(committed versions, settled groups, newest version in any stored answer, evaluations) by run, as a restart would find them."""
    engine = open_database(state_dir / "noria.sqlite")
    try:
        with engine.begin() as connection:
            if not connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE name = 'versions'").all():
                return {}, {}, {}, {}
            rows = [row for name in ("one", "two") for row in store.versions(connection, name)]
            groups = connection.execute(select(GROUPS)).all()
            evaluations = connection.execute(select(store.EVALUATIONS)).all()
    finally:
        engine.dispose()
    committed = {(r.record.run_id, r.record.version): r.record for r in rows}
    settled = {g.group_id: (g.status, g.reason, g.trained_version) for g in groups if g.status in SETTLED}
    answered: dict[str, int] = {}
    for group in (decode_group(g.payload) for g in groups if g.payload is not None):
        seen = [v for episode in group.episodes for turn in episode.turns for v in turn.completion.versions]
        answered[group.run_id] = max(answered.get(group.run_id, 0), *seen)
    return committed, settled, answered, {(row.run_id, row.version): tuple(row) for row in evaluations}


class Ledger:
    """What has been seen in the state folder after each death; `check` compares it with what is there now."""

    def __init__(self, state_dir, due):
        self.state_dir, self.due = state_dir, due
        self.committed, self.settled, self.evaluations = {}, {}, {}
        self.num_cut_short = 0

    def check(self):
        committed, settled, answered, evaluations = snapshot(self.state_dir)
        for key, record in self.committed.items():
            assert committed[key] == record, "a committed version changed"
        for group_id, outcome in self.settled.items():
            assert settled[group_id] == outcome, "a settled group was settled again"
        assert self.evaluations.items() <= evaluations.items(), "a version was evaluated twice"
        self.num_cut_short += len([key for key in committed if key[1] in self.due and key not in evaluations])
        for name, version in answered.items():
            assert (name, version) in committed, "an answer names a version that was never committed"
        for name in ("one", "two"):
            versions = [version for run, version in committed if run == name]
            assert versions == list(range(len(versions)))
            if versions:  # loading compares the bytes with the commit
                VersionFiles(self.state_dir / "adapters").load(committed[name, versions[-1]], width=16)
        self.committed, self.settled, self.evaluations = committed, settled, evaluations

    def run_until_killed(self, command, environment, rng):
        """Start the command, let it commit a random number of new versions (none: kill it while it starts), kill -9."""
        before, wanted = len(self.committed), rng.randrange(0, 8)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        limit = time.monotonic() + 120
        while wanted and process.poll() is None and time.monotonic() < limit and num_committed(self.state_dir) - before < wanted:
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 0.3) if wanted else rng.uniform(0.5, 4.0))
        assert process.poll() is None, process.communicate()[1].decode()[-2000:]
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("num_kills", "steps"), [(5, 40), pytest.param(10, 100, marks=pytest.mark.prove)])
def test_after_kills_every_group_is_settled_once_every_evaluation_made_and_no_version_has_two_contents(tmp_path, num_kills, steps):
    (tmp_path / "letters.py").write_text(ENVIRONMENT)
    for seed, name in enumerate(("one", "two")):
        (tmp_path / f"{name}.toml").write_text(RUN.format(name=name, seed=seed, steps=steps, staleness=seed, every=EVERY))
    (tmp_path / "server.toml").write_text(SERVER_FILE)
    state_dir = tmp_path / "state"
    command = [sys.executable, "-m", "noria.cli", "train", str(tmp_path / "one.toml"), str(tmp_path / "two.toml")]
    command += ["--server-config", str(tmp_path / "server.toml"), "--state-dir", str(state_dir), "--json", "--resume", "--no-report"]
    environment = os.environ | {"NORIA_CACHE_DIR": str(tmp_path / "cache")}
    rng, ledger = random.Random(9), Ledger(state_dir, due(steps))  # the third of its kills comes while the server starts
    for _ in range(num_kills):
        ledger.run_until_killed(command, environment, rng)
        ledger.check()
    assert 2 * 2 < len(ledger.committed) < 2 * (steps + 1), "the kills must have hit a run that was under way"

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    ledger.check()
    assert {run["name"]: run["version"] for run in report["runs"]} == {"one": steps, "two": steps}
    assert all(run["max_staleness_seen"] <= run["max_staleness"] and run["dropped_stale"] == 0 for run in report["runs"])
    assert_all_settled_once(state_dir, steps)
    assert sorted(ledger.evaluations) == [(name, version) for name in ("one", "two") for version in due(steps)]
    assert ledger.num_cut_short, "a kill must have hit an evaluation that was under way"


def assert_all_settled_once(state_dir, steps):
    engine = open_database(state_dir / "noria.sqlite")
    with engine.begin() as connection:
        groups = connection.execute(select(GROUPS)).all()
    engine.dispose()
    assert all(g.status in SETTLED for g in groups), "a group was lost"
    for name in ("one", "two"):
        mine = [g for g in groups if g.run_id == name]
        assert sorted(g.admission for g in mine) == list(range(len(mine)))
        assert {g.trained_version for g in mine if g.status == "trained"} == set(range(1, steps + 1))
        assert {g.reason for g in mine if g.status == "dropped"} <= {"no_signal", "stopped"}
