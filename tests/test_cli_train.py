"""`noria train` from the command line to the report, on the tiny model: each in a process of its own, whose signals and exit codes are meant."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tool_builders import SERVER_FILE

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

ENVIRONMENT = """
from noria.envs.single_turn import SingleTurn

class Lower(SingleTurn):
    def problem(self, rng): return "".join(rng.choices("abcdef", k=6)), ""
    def reward(self, action, answer): return sum(c.islower() for c in action) / 4

class Broken(Lower):
    def reward(self, action, answer): raise ValueError("out of order")
"""

SMALL = "group_size = 4\ngroups_per_batch = 2\ntruncated = 'keep'\n[sampling]\nmax_tokens = 4\n[evaluation]\nnum_tasks = 8\n"

LONGEST_S = 240.0


def run_file(folder: Path, name: str = "lower", *, steps: int = 3, kind: str = "Lower", more: str = "") -> Path:
    (folder / "env.py").write_text(ENVIRONMENT, encoding="utf-8")
    path = folder / f"{name}.toml"
    text = f'name = "{name}"\nbase = "tiny"\n[environment]\nname = "env.py:{kind}"\n[algorithm]\nsteps = {steps}\n{SMALL}{more}'
    path.write_text(text, encoding="utf-8")
    return path


def small_server(folder: Path) -> tuple[str | Path, ...]:
    """The arguments for one with few and small programs, where the default's are not what is meant."""
    (folder / "server.toml").write_text(SERVER_FILE, encoding="utf-8")
    return "--server-config", folder / "server.toml"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "noria.cli", "train", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NORIA_INSTALL_S": "1.5"}


def train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=LONGEST_S, check=False)


def train_until(words: str, numbers: Sequence[signal.Signals], *arguments: str | Path) -> tuple[int, str]:
    """Start training, send the signals as soon as `words` is on stderr, and return the exit code and all of stderr."""
    process = subprocess.Popen(command(*arguments), env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    written, deadline_s = "", time.monotonic() + LONGEST_S
    for line in process.stderr:
        written += line
        if words in line:
            break
        assert time.monotonic() < deadline_s, written
    for number in numbers:
        process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    return process.returncode, written + rest


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def listed(state_dir: Path) -> list[dict[str, Any]]:
    arguments = [sys.executable, "-m", "noria.cli", "runs", "list", "--json", "--state-dir", str(state_dir)]
    found: list[dict[str, Any]] = json.loads(subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=True).stdout)
    return found


def test_two_run_files_train_to_their_end_and_leave_a_report(tmp_path: Path) -> None:
    files, state_dir = [run_file(tmp_path, "lower"), run_file(tmp_path, "other", steps=2)], tmp_path / "state"
    done = train(*files, "--state-dir", state_dir, "--json")
    summary = summary_of(done)
    assert [(run["name"], run["version"]) for run in summary["runs"]] == [("lower", 3), ("other", 2)]
    for run in summary["runs"]:
        assert run["max_staleness_seen"] <= run["max_staleness"] == 1
        assert run["dropped_stale"] == 0
        assert run["tokens_sampled"] >= run["tokens_trained"] > 0
        assert 0 <= run["eval_before"] <= 1
        assert 0 <= run["eval_after"] <= 1
    assert 0 < summary["sampler_busy"] <= 1
    assert 0 < summary["learner_busy"] <= 1
    assert summary["install_s"] == 1.5
    assert summary["wall_s"] > 1
    assert len(done.stdout.splitlines()) == 1, "nothing but the object is on stdout"
    page = (state_dir / "report.html").read_text(encoding="utf-8")
    assert "lower" in page
    assert (state_dir / "curves.png").stat().st_size > 10_000

    again = train(files[0], "--state-dir", state_dir, "--json")
    assert (again.returncode, again.stdout) == (2, "")
    assert "error[state_conflict]: run lower exists already" in again.stderr

    resumed = summary_of(train(*files, "--state-dir", state_dir, "--json", "--resume", "--no-report"))
    assert [run["version"] for run in resumed["runs"]] == [3, 2]
    assert [run["eval_after"] for run in resumed["runs"]] == [run["eval_after"] for run in summary["runs"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_in_order_and_resume_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    path, state_dir, server = run_file(tmp_path, steps=40), tmp_path / "state", small_server(tmp_path)
    code, written = train_until("step 2/40", [number], path, *server, "--state-dir", state_dir, "--json")
    assert code == 130, written
    assert written.endswith("stopped; resume with --resume\n")
    assert "Traceback" not in written
    (before,) = listed(state_dir)
    assert before["status"] == "stopped"
    assert 2 <= before["version"] < 40

    (run,) = summary_of(train(path, *server, "--state-dir", state_dir, "--json", "--resume"))["runs"]
    assert run["version"] == 40
    assert run["eval_before"] == before["evaluations"]["0"]
    (after,) = listed(state_dir)
    assert after["status"] == "finished"


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    path, state_dir = run_file(tmp_path, steps=400), tmp_path / "state"
    started = command(path, *small_server(tmp_path), "--state-dir", state_dir, "--json")
    process = subprocess.Popen(started, env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 2/400" in line:
            process.send_signal(signal.SIGTERM)
        if "stopping in order" in line:
            process.send_signal(signal.SIGTERM)
            break
    process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGTERM, 130), "killed, unless the orderly end was faster"
    (run,) = listed(state_dir)
    assert run["version"] >= 2


def test_a_run_that_fails_exits_with_1_and_leaves_the_others_alone(tmp_path: Path) -> None:
    broken = run_file(tmp_path, "broken", kind="Broken", more="[actors]\nmax_failed_groups = 2\nepisode_tries = 1\n").read_text(encoding="utf-8")
    (tmp_path / "broken.toml").write_text(broken.replace("num_tasks = 8", "num_tasks = 0"), encoding="utf-8")
    files = run_file(tmp_path, "lower"), tmp_path / "broken.toml"
    done = train(*files, *small_server(tmp_path), "--state-dir", tmp_path / "state", "--json")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error[run_failed]: run broken: 2 groups in a row failed")
    assert "out of order" in last
    assert "Traceback" not in done.stderr
    versions = {run["name"]: run["version"] for run in json.loads(done.stdout.splitlines()[-1])["runs"]}
    assert versions == {"lower": 3, "broken": 0}


def test_what_cannot_be_started_exits_with_2(tmp_path: Path) -> None:
    done = train(run_file(tmp_path, kind="Missing"), "--state-dir", tmp_path / "state", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error[environment_failed]: " in done.stderr
    assert "Traceback" not in done.stderr
