"""Places that cannot be written: every writer answers with the one error, and leaves nothing behind."""

import asyncio
import errno
import json
import logging
import os
import resource
from pathlib import Path

import jax
import pytest
from export_builders import random_adapter
from learner_builders import nonzero_state, spec
from safetensors import SafetensorError
from sqlalchemy import event
from tool_builders import SERVER, Low, write_run
from typer.testing import CliRunner

import noria
from noria import cli
from noria.adapters.versions import VersionFiles
from noria.buffer.database import open_database
from noria.buffer.sqlite import SqliteBuffer
from noria.clock import RealClock
from noria.config import ServerConfig
from noria.errors import ConfigError, StateConflictError, StorageError
from noria.model.durable import whole_folder
from noria.model.export import write_peft
from noria.model.weights import load_base
from noria.report.files import write_aside
from noria.service import build, folder, store
from noria.service.export import export_version
from noria.types import LoraSpec


@pytest.fixture(params=["a file", "below a file", "proc", "too long"])
def place(request, tmp_path):
    """A folder that nobody can make, not even the superuser."""
    (tmp_path / "file").write_text("here first", encoding="utf-8")
    return {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "state",
        "proc": Path("/proc/nope"),
        "too long": tmp_path / ("x" * 5000),
    }[request.param]


def left(tmp_path):
    return {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}


def test_a_server_does_not_start_there(place):
    with pytest.raises(StorageError, match="cannot write"), folder.exclusive(place):
        pass


def test_a_session_in_python_does_not_start_there(place):
    with pytest.raises(StorageError, match="cannot write"):
        noria.train(Low, model="tiny", steps=1, folder=place, server=SERVER, progress=False)


def test_a_folder_with_an_impossible_name_is_the_same_error(tmp_path):
    with pytest.raises(StorageError, match="null"):
        noria.train(Low, model="tiny", steps=1, folder=tmp_path / "a\0b", server=SERVER, progress=False)


@pytest.mark.parametrize("command", ["train", "demo"])
def test_commands_say_so_in_one_line(place, tmp_path_factory, command):
    arguments = [str(write_run(tmp_path_factory.mktemp("run")))] if command == "train" else []
    result = CliRunner().invoke(cli.app, [command, *arguments, "--state-dir", str(place)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error[st"), result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["runs", "list"], ["runs", "show", "a"], ["runs", "export", "a", "--out", "b"], ["debug", "step", "a", "--version", "1"]]
)
def test_commands_that_read_find_no_state_there(place, arguments):
    result = CliRunner().invoke(cli.app, [*arguments, "--state-dir", str(place)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error[state_conflict]")


def test_the_doctor_finds_that_no_state_can_be_kept_there(place):
    result = CliRunner().invoke(cli.app, ["doctor", "--json", "--state-dir", str(place)])
    assert result.exit_code == 1, result.output
    assert "fail" in {finding["status"] for finding in json.loads(result.stdout) if finding["topic"] in ("disk", "fsync")}


def test_an_adapter_is_not_exported_there(place, tmp_path):
    lora, base = LoraSpec(2, 4.0), load_base("tiny")
    before = left(tmp_path)
    with pytest.raises((StorageError, StateConflictError)):
        write_peft(place, random_adapter(base.config, lora), lora, base.config, base_name="tiny")
    assert left(tmp_path) == before


def test_a_file_for_people_is_not_written_there(place, tmp_path):
    before = left(tmp_path)
    with pytest.raises(StorageError, match="cannot write"):
        write_aside(place / "curves.png", b"picture")
    assert left(tmp_path) == before


def test_a_session_goes_on_without_a_compilation_cache(place, monkeypatch, caplog):
    monkeypatch.setattr(build, "cache_dir", lambda: place)
    before = jax.config.jax_compilation_cache_dir
    with caplog.at_level(logging.WARNING):
        build._use_compilation_cache()
    assert "NORIA_CACHE_DIR" in caplog.text
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error: No space left on device")])
def test_a_folder_on_a_full_disk_is_not_there(tmp_path, error):
    def write():
        with whole_folder(tmp_path / "target") as aside:
            (aside / "half").write_text("half", encoding="utf-8")
            raise error

    with pytest.raises(StorageError, match="No space left"):
        write()
    assert left(tmp_path) == {}


def test_a_version_that_the_disk_has_no_room_for_is_a_storage_error_and_leaves_nothing(tmp_path):
    """The system's limit of a file's size stands for a disk that is full: both refuse to write on."""
    state, before = nonzero_state(1, spec("run", rank=4)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StorageError, match="cannot write"):
            VersionFiles(tmp_path).write("run", state.num_steps, state, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_state_database_without_room_is_a_storage_error(tmp_path):
    database = open_database(tmp_path / "noria.sqlite")
    store.create_tables(database)
    buffer = SqliteBuffer(database, RealClock())
    event.listen(database, "begin", lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 1"))
    try:
        with pytest.raises(StorageError, match="full"):
            asyncio.run(
                buffer.transaction(lambda connection: connection.exec_driver_sql("CREATE TABLE big AS SELECT zeroblob(1000000) AS x") and None)
            )
    finally:
        buffer.close()
        database.dispose()


def test_the_settings_of_a_server_on_a_full_disk_are_a_storage_error(tmp_path):
    (tmp_path / f"{folder.SERVER}.part").mkdir()
    with pytest.raises(StorageError, match=r"server\.json"):
        folder.record_server(tmp_path, ServerConfig())


@pytest.mark.parametrize("changes", [{"kind": "PEFT"}, {"kind": None}, {"dtype": "float16"}, {"kind": ["peft"]}])
def test_an_unknown_kind_of_export_is_refused_before_anything_is_read(tmp_path, changes):
    with pytest.raises(ConfigError, match="must be"):
        export_version(tmp_path / "nowhere", "run", version="newest", out=tmp_path / "out", **{"kind": "peft", **changes})
