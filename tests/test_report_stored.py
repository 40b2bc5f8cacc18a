"""Runs as a state folder knows them, read without a server and without changing anything."""

import io
import json
from pathlib import Path

import pytest
from report_builders import run_config
from rich.console import Console, RenderableType
from sqlalchemy import select, update
from typer.testing import CliRunner

from noria import cli
from noria.buffer import life
from noria.buffer.database import open_database
from noria.buffer.tables import METADATA
from noria.errors import StateConflictError, UnknownVersionError
from noria.report.episodes import read_episodes
from noria.report.stored import as_json, find_stored, list_table, read_runs, show_table
from noria.service import store
from noria.types import AdapterVersion


def write_state(folder: Path, *, names: tuple[str, ...] = ("largest", "addition"), num_steps: int = 3) -> None:
    engine = open_database(folder / "noria.sqlite")
    METADATA.create_all(engine)
    with engine.begin() as connection:
        for number, name in enumerate(names):
            store.create_run(connection, run_config(name), now_s=100.0 - number)
            life.register_run(connection, life.Cursor(name, 0, 4096, 8, 3, 0, 0, 0))
            for version in range(num_steps + 1):
                metrics = {"reward_mean": version / 10, "num_entries": 480.0, "staleness_max": 1.0} if version else {}
                store.add_version(connection, AdapterVersion(name, version, 7, 8, f"{name}/{version}"), metrics, 200.0 + version)
            store.add_evaluation(connection, name, store.EvaluationRow(0, 0.25, 0.3, 64, 0), 200.0)
        store.set_status(connection, names[0], store.FAILED, "run_failed: ten groups in a row failed")
    engine.dispose()


def text_of(table: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(table)
    return console.export_text()


def test_runs_are_read_oldest_first_with_their_versions_and_evaluations(tmp_path: Path) -> None:
    write_state(tmp_path)
    runs = read_runs(tmp_path)
    assert [run.row.run_id for run in runs] == ["addition", "largest"]
    assert [run.version for run in runs] == [3, 3]
    assert runs[0].rewards == [0.1, 0.2, 0.3]
    assert [evaluation.accuracy for evaluation in runs[0].evaluations] == [0.25]


def test_reading_changes_nothing(tmp_path: Path) -> None:
    write_state(tmp_path)
    assert [as_json(run, is_full=True) for run in read_runs(tmp_path)] == [as_json(run, is_full=True) for run in read_runs(tmp_path)]


def test_a_run_is_plain_data(tmp_path: Path) -> None:
    write_state(tmp_path)
    run = find_stored(read_runs(tmp_path), "largest")
    short, full = as_json(run, is_full=False), as_json(run, is_full=True)
    assert json.loads(json.dumps(full, allow_nan=False)) == full
    assert short.items() <= full.items()
    assert (short["status"], short["version"], short["steps"], short["evaluations"]) == ("failed", 3, 20, {"0": 0.25})
    assert full["config"]["adapter"]["rank"] == 8
    assert [version["version"] for version in full["versions"]] == [0, 1, 2, 3]


def test_tables_show_what_a_reader_looks_for(tmp_path: Path) -> None:
    write_state(tmp_path, num_steps=15)
    runs = read_runs(tmp_path)
    listed = text_of(list_table(runs))
    assert all(word in listed for word in ("largest", "addition", "amber", "failed", "running", "15/20", "1.50", "0.25"))
    shown = text_of(show_table(find_stored(runs, "largest")))
    assert "run_failed: ten groups in a row failed" in shown
    assert [line.split()[0] for line in shown.rstrip().splitlines()[-10:]] == [str(version) for version in range(6, 16)]


def test_a_folder_without_a_state_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(StateConflictError, match=r"no state folder: it has no noria\.sqlite"):
        read_runs(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_an_unknown_run_is_answered_with_those_there_are(tmp_path: Path) -> None:
    write_state(tmp_path)
    with pytest.raises(StateConflictError, match=r"there is no run 'larges'.*addition, largest"):
        find_stored(read_runs(tmp_path), "larges")


def change_config(folder: Path, name: str, **changes: object) -> None:
    """As another version of noria would have written it."""
    engine = open_database(folder / "noria.sqlite")
    with engine.begin() as connection:
        (text,) = connection.execute(select(store.RUNS.c.config).where(store.RUNS.c.run_id == name)).one()
        changed = json.dumps(json.loads(text) | changes)
        connection.execute(update(store.RUNS).where(store.RUNS.c.run_id == name).values(config=changed))
    engine.dispose()


@pytest.mark.parametrize("changes", [{"novel": 1}, {"weight": None}, {"algorithm": "new"}])
def test_a_run_of_another_version_is_named_and_hides_no_other(tmp_path: Path, changes: dict[str, object]) -> None:
    write_state(tmp_path, names=("largest", "addition", "doubling"))
    change_config(tmp_path, "addition", **changes)
    runs = read_runs(tmp_path)
    (key,) = changes
    with pytest.raises(StateConflictError, match=rf"run addition was written by another version of noria.*{key}"):
        find_stored(runs, "addition")
    listed = text_of(list_table(runs))
    assert all(word in listed for word in ("largest", "doubling", "unreadable", "error[state_conflict]: run addition"))
    assert {run["name"]: run["status"] for run in (as_json(run, is_full=False) for run in runs)} == {
        "doubling": "running",
        "addition": "unreadable",
        "largest": "failed",
    }
    assert find_stored(runs, "largest").version == 3


def test_commands_answer_a_run_of_another_version_with_one_line(tmp_path: Path) -> None:
    write_state(tmp_path, names=("largest", "addition", "doubling"))
    change_config(tmp_path, "addition", novel=1)
    for command, code in (
        (["list"], 0),
        (["list", "--json"], 0),
        (["show", "largest"], 0),
        (["compare", "largest", "doubling"], 0),
        (["show", "addition"], 2),
        (["compare", "largest", "addition"], 2),
        (["export", "addition", "--out", str(tmp_path / "out")], 2),
        (["episodes", "addition", "--out", str(tmp_path / "out.jsonl")], 2),
    ):
        result = CliRunner().invoke(cli.app, ["runs", *command, "--state-dir", str(tmp_path)])
        assert result.exit_code == code, (command, result.output)
        assert ("error[state_conflict]" in result.stderr) == (code == 2)


def test_episodes_of_a_version_that_is_not_there_are_refused(tmp_path: Path) -> None:
    write_state(tmp_path)
    with pytest.raises(UnknownVersionError, match="no version 77"):
        read_episodes(tmp_path, "largest", version=77)
