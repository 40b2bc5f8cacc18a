"""`deterministic = true`: the same file and seed give the same curve and the same final bytes, alone, beside busy others, and across kills.

What varies is everything that may: how long the environment takes (random, from the clock), who else is there, and when the process dies. The run has
more episodes than half of the lanes, and turns that build on what was sampled: so decode widths and cached pages differ between the times.
"""

import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest

from noria.buffer.database import open_database
from noria.service import store

RUN = """
name = "{name}"
tenant = "{name}"
base = "tiny"
seed = 3
deterministic = {deterministic}

[environment]
name = "talk.py:Talk"

[algorithm]
steps = {steps}
group_size = {group_size}
groups_per_batch = {groups_per_batch}
max_staleness = {staleness}
truncated = "keep"
zero_signal = "{zero_signal}"

[adapter]
rank = {rank}
learning_rate = 1e-2

[actors]
max_turns = 3

[sampling]
max_tokens = {max_tokens}

[evaluation]
num_tasks = 5
every = 2
samples = 2
temperature = 1.0
"""

ENVIRONMENT = '''
import asyncio
import random
from noria.protocols import Step

class Talk:
    """Three turns, each rewarded for low bytes, after pauses whose length nobody knows."""

    num_tasks, num_held_out = 40, 8

    async def reset(self, task):
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.05))
        self.turns = 0
        letters = random.Random(f"{task.index} {task.seed}")
        return "".join(letters.choice("abcdefgh") for _ in range(letters.randrange(5, 60)))

    async def step(self, action):
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.05))
        self.turns += 1
        sent = action.encode()
        return Step(float(sum(byte < 100 for byte in sent) > len(sent) // 3), self.turns == 3, " and? ")
'''

STEPS = 4
NEIGHBOURS = {"one": (4, 6, 7, 6), "two": (8, 6, 7, 11), "three": (64, 4, 2, 1), "four": (4, 2, 3, 40), "five": (4, 3, 2, 17)}
"""Rank, group size, groups per batch and max_tokens of each; one of them is in a rank class of its own."""

TIMEOUT_S = 300
"""For each process to get where it should; one takes about 20 s on two idle cores."""


MANY = [pytest.param(zero_signal, 3, marks=pytest.mark.prove) for zero_signal in ("skip", "resample")]


@pytest.mark.slow
@pytest.mark.parametrize(("zero_signal", "num_kills"), [("skip", 2), ("resample", 1), *MANY])
def test_a_deterministic_run_has_one_curve_and_one_end_alone_beside_others_and_after_kills(tmp_path, zero_signal, num_kills):
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    for name, sizes in {"mine": (4, 6, 7, 6), **NEIGHBOURS}.items():
        write_run(tmp_path, name, sizes, zero_signal)
    alone = outcome_of(tmp_path, "alone", ["mine"])
    assert [row.version for row in alone["evaluations"]] == [0, 2, 4]
    assert len({tuple(sorted(step.items())) for step in alone["steps"]}) == STEPS
    if zero_signal == "skip":  # the other rule meets neighbours below
        assert outcome_of(tmp_path, "beside", ["mine", *NEIGHBOURS]) == alone
    assert outcome_of(tmp_path, "killed", ["mine", "one", "four"], num_kills=num_kills) == alone


def write_run(folder, name, sizes, zero_signal):
    is_mine = name == "mine"
    rank, group_size, groups_per_batch, max_tokens = sizes
    text = RUN.format(
        name=name,
        rank=rank,
        steps=STEPS if is_mine else 10_000,
        deterministic=str(is_mine).lower(),
        staleness=int(not is_mine),
        zero_signal=zero_signal,
        group_size=group_size,
        groups_per_batch=groups_per_batch,
        max_tokens=max_tokens,
    )
    (folder / f"{name}.toml").write_text(text)


def outcome_of(folder, name, runs, *, num_kills=0):
    """Train the run files until "mine" has finished, dying on the way `num_kills` times; what became of "mine"."""
    state_dir, rng = folder / name, random.Random(name)
    command = [sys.executable, "-m", "noria.cli", "train", *(str(folder / f"{run}.toml") for run in runs)]
    command += ["--state-dir", str(state_dir), "--json", "--resume"]
    for number in range(num_kills + 1):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wanted = (STEPS, True) if number == num_kills else (progress(state_dir)[0] + rng.randrange(1, 3), False)
        limit = time.monotonic() + TIMEOUT_S
        while progress(state_dir) < wanted and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        error = process.communicate()[1].decode()[-2000:]
        assert progress(state_dir) >= wanted, error
        assert process.returncode in (0, -signal.SIGKILL), error
    return outcome(state_dir)


def progress(state_dir):
    """(newest version, has it finished) of the run; (-1, False) before it has any."""
    try:
        with closing(sqlite3.connect(f"file:{state_dir / 'noria.sqlite'}?mode=ro", uri=True)) as database:
            (newest,) = database.execute("SELECT max(version) FROM versions WHERE run_id = 'mine'").fetchone()
            found = database.execute("SELECT status FROM runs WHERE run_id = 'mine'").fetchone()
    except sqlite3.OperationalError:
        return (-1, False)
    return (-1 if newest is None else newest, found == (store.FINISHED,))


def outcome(state_dir):
    """All that must be equal: of each version its checksums and metrics (but how long it took), the evaluations, the final files."""
    database = open_database(state_dir / "noria.sqlite")
    with database.begin() as connection:
        rows, evaluations = store.versions(connection, "mine"), store.evaluations(connection, "mine")
    database.dispose()
    last = state_dir / "adapters" / "mine" / str(rows[-1].record.version)
    return {
        "checksums": [(row.record.checksum, row.record.moments_checksum) for row in rows],
        "steps": [{name: value for name, value in row.metrics.items() if not name.endswith("_s")} for row in rows[1:]],
        "evaluations": evaluations,
        "files": {path.name: path.read_bytes() for path in sorted(last.iterdir())},
    }
