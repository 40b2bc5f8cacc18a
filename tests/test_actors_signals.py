"""A signal stops `noria train` in order within seconds, whatever the environment's code hangs in; each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tool_builders import SERVER_FILE

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

ENVIRONMENT = """
import asyncio, sys, threading
from noria.envs.single_turn import SingleTurn

def hang(*_):
    print("hanging", file=sys.stderr, flush=True)
    threading.Event().wait()

class Letters(SingleTurn):
    def problem(self, rng): return "".join(rng.choices("abcdef", k=6)), ""

class Plain(Letters):
    reward = hang

class Blocks(Letters):
    async def step(self, action): hang()

class Spins(Letters):
    async def step(self, action):
        print("hanging", file=sys.stderr, flush=True)
        while True: pass

class Threads(Letters):
    async def step(self, action): await asyncio.to_thread(hang)

class Builds(Letters):
    def __init__(self, **settings): hang()
"""

RUN = """
name = "r"
base = "tiny"
[environment]
name = "env.py:{kind}"
[algorithm]
steps = 3
group_size = 4
groups_per_batch = 2
[sampling]
max_tokens = 4
[evaluation]
num_tasks = 0
[deadlines]
reset_s = {reset_s}
"""


def start(folder, kind, *, text=ENVIRONMENT, reset_s=60):
    (folder / "env.py").write_text(text, encoding="utf-8")
    (folder / "r.toml").write_text(RUN.format(kind=kind, reset_s=reset_s), encoding="utf-8")
    (folder / "server.toml").write_text(SERVER_FILE, encoding="utf-8")
    command = [sys.executable, "-m", "noria.cli", "train", str(folder / "r.toml"), "--server-config", str(folder / "server.toml")]
    command += ["--state-dir", str(folder / "state"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize("kind", ["Plain", "Blocks", "Spins", "Threads", "Builds", "import"])
def test_a_signal_stops_training_while_the_environment_hangs(tmp_path, kind):
    process = start(tmp_path, kind, text=ENVIRONMENT + ("\nhang()\n" if kind == "import" else ""))
    for line in process.stderr:
        if line == "hanging\n":
            break
    signalled_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert rest.endswith("stopped; resume with --resume\n")
    assert "Traceback" not in rest
    assert time.monotonic() - signalled_s < 20


def test_an_environment_that_hangs_at_import_is_refused_at_its_deadline(tmp_path):
    process = start(tmp_path, "Letters", text=ENVIRONMENT + "\nhang()\n", reset_s=1)
    _, written = process.communicate(timeout=120)
    assert process.returncode == 2, written
    assert "error[deadline_exceeded]: waited 1 s for environment 'env.py:Letters' to load" in written
    assert "Traceback" not in written
