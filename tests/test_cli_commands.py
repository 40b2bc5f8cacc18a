"""The command line without training: help stays light, bad usage and bad files exit with 2 and one line, a demo forgets only its own runs."""

import fcntl
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from noria import cli
from noria.config import install_seconds
from noria.errors import ConfigError, StateConflictError
from noria.service import folder as state_folders

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "matplotlib", "sqlalchemy", "numpy")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "100", "TERM": "dumb"})


def in_process(*arguments: str) -> str:
    """Run noria in a fresh interpreter and print, after its output, which heavy packages it loaded."""
    script = (
        "import sys\nfrom noria.cli import app\n"
        f"try:\n    app({list(arguments)!r})\nexcept SystemExit as error:\n    assert not error.code, error.code\n"
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(tree: typer.Typer = cli.app) -> list[list[str]]:
    """Every command's words, those of nested commands too."""
    own = [[command.name] for command in tree.registered_commands if command.name]
    return own + [[group.name, *words] for group in tree.registered_groups if group.typer_instance for words in commands(group.typer_instance)]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["runs", "--help"], ["runs", "export", "--help"], ["version"]])
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    assert in_process(*arguments).endswith("loaded: []\n")


def test_the_commands_are_those_of_the_design() -> None:
    named = {" ".join(words) for words in commands()}
    assert named == {
        *("demo", "train", "check", "doctor", "bench", "version", "debug step"),
        *(f"runs {name}" for name in ("list", "show", "compare", "export", "episodes")),
    }


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help_with_an_example_of_itself(words: list[str]) -> None:
    result = call(*words, "--help")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert f"noria {' '.join(words)}" in text.partition("Examples:")[2]
    assert "Exit codes" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["noria demo", "noria train my_run.toml"]),
        (["demo", "--help"], ["noria demo --resume", "Exit codes: 0 all went well, 1 a run failed, 2 the command"]),
        (["train", "--help"], ["noria train my_run.toml --resume", "130 stopped", "beside their run file"]),
        (["runs", "show", "--help"], ["noria runs show largest"]),
    ],
)
def test_help_shows_examples_and_exit_codes(arguments: list[str], words: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 0
    assert all(word in " ".join(result.output.split()) for word in words), result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["demo", "--steps", "-1"],
        ["demo", "--install-s", "-1"],
        ["demo", "--fast"],
        ["nothing"],
        ["runs", "export", "a"],
        ["debug", "step", "a"],
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


RUN = 'name = "a"\n[environment]\nname = "addition"\n[algorithm]\nsteps = 3\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RUN + "[adapter]\nlearning_rte = 1e-3\n", "unknown key 'adapter.learning_rte'; did you mean 'learning_rate'?"),
        (RUN.replace("steps = 3", "steps = -1"), "algorithm.steps"),
        (RUN + "[adapter\n", "is not valid TOML"),
        (RUN + "[learner]\nmax_rank = 4\n", "unknown key 'learner'"),
    ],
)
def test_a_bad_run_file_exits_with_2_and_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    result = call("train", path, "--state-dir", tmp_path / "state")
    assert result.exit_code == 2
    assert result.stderr.startswith("error[config_invalid]: ")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "state").exists()


def test_a_folder_without_a_state_exits_with_2(tmp_path: Path) -> None:
    result = call("runs", "list", "--state-dir", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error[state_conflict]: ")


def state_folder(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("x", encoding="utf-8")
    return folder


def with_runs(folder: Path, *names: str) -> Path:
    with closing(sqlite3.connect(folder / "noria.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE runs (run_id TEXT)")
        connection.executemany("INSERT INTO runs VALUES (?)", [(name,) for name in names])
    for name in names:
        (folder / "adapters" / name / "0").mkdir(parents=True)
    return folder


def test_a_demo_forgets_its_previous_runs_and_keeps_everything_else(tmp_path: Path) -> None:
    folder = with_runs(state_folder(tmp_path / "demo", "lock", "report.html", "noria.log", "server.json", "thesis.tex"), "largest", "doubling")
    (folder / "adapters" / "mine").mkdir()
    state_folders.clear(folder, ["largest", "doubling", "first_letter"])
    assert sorted(path.name for path in folder.iterdir()) == ["adapters", "lock", "thesis.tex"]
    assert [path.name for path in (folder / "adapters").iterdir()] == ["mine"]
    state_folders.clear(folder, ["largest"])
    state_folders.clear(tmp_path / "nowhere", ["largest"])


def test_a_demo_refuses_a_folder_with_other_runs(tmp_path: Path) -> None:
    folder = with_runs(state_folder(tmp_path / "demo"), "largest", "mine")
    result = call("demo", "--state-dir", folder)
    assert result.exit_code == 2
    assert result.stderr.startswith("error[state_conflict]: ")
    assert "(mine)" in result.stderr
    assert (folder / "adapters" / "largest").exists()
    assert (folder / "noria.sqlite").exists()


@pytest.mark.parametrize("is_file", [True, False])
def test_a_demo_refuses_a_file_and_what_is_no_database(tmp_path: Path, is_file: bool) -> None:
    path = tmp_path / "demo"
    if is_file:
        path.write_text("x", encoding="utf-8")
    else:
        (state_folder(path) / "noria.sqlite").write_text("x" * 2000, encoding="utf-8")
    with pytest.raises(StateConflictError):
        state_folders.clear(path, ["largest"])
    assert path.exists()


def test_a_demo_refuses_a_folder_in_use(tmp_path: Path) -> None:
    folder = with_runs(state_folder(tmp_path / "demo", "lock"), "largest")
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StateConflictError, match="another process"):
            state_folders.clear(folder, ["largest"])
    assert (folder / "noria.sqlite").exists()


@pytest.mark.parametrize(("text", "seconds"), [(None, 0.0), ("12.5", 12.5), ("0", 0.0)])
def test_installation_seconds_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float) -> None:
    if text is None:
        monkeypatch.delenv("NORIA_INSTALL_S", raising=False)
    else:
        monkeypatch.setenv("NORIA_INSTALL_S", text)
    assert install_seconds() == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_nonsensical_installation_seconds_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NORIA_INSTALL_S", text)
    with pytest.raises(ConfigError, match="NORIA_INSTALL_S"):
        install_seconds()


def test_elapsed_time_counts_from_the_process_start() -> None:
    earlier, later = cli.elapsed_s(), cli.elapsed_s()
    assert 0 < earlier <= later
    script = "import time; time.sleep(0.3); from noria.cli import elapsed_s; print(elapsed_s())"
    printed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 0.3 <= float(printed) < 30
