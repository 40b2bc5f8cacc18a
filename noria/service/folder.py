"""The state folder of a server: what lies in it, the lock that gives it to one process at a time, and how runs in it are forgotten."""

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from noria.config import ServerConfig
from noria.errors import StateConflictError
from noria.storage import storing

DATABASE = "noria.sqlite"
"""Runs, versions, evaluations, groups (service/store.py, buffer/tables.py)."""

ADAPTERS = "adapters"
"""Committed adapter versions (adapters/versions.py)."""

PAGES = "pages"
"""Training states that fit neither in the learner's slots nor in host memory (learner/paging.py). They mean nothing to a later process."""

LOG = "noria.log"
"""Structured logs, one JSON object a line."""

REPORTS = ("report.html", "curves.png", "timeline.json")
"""What a session leaves for people (report/page.py)."""

SERVER = "server.json"
"""The configuration of the newest server on the folder: with it a recorded step can be taken again in the same shapes."""

LOCK = "lock"
"""An empty file whose lock the serving process holds. It is never removed: a lock on a removed file would exclude nobody."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder, which is created if there is none: two servers on one folder would name two contents with one version.

    Raises StateConflictError if another process holds it, StorageError if it cannot be written.
    """
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / LOCK).open("w")
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StateConflictError(f"another process is using {folder}: stop it, or choose another folder (--state-dir, or folder=...)") from error
        yield


def record_server(folder: Path, config: ServerConfig) -> None:
    """Leave the configuration of the server that now uses the folder, instead of its predecessor's. Raises StorageError."""
    aside = folder / f"{SERVER}.part"
    with storing(folder / SERVER):
        aside.write_text(config.model_dump_json(indent=1), encoding="utf-8")
        os.replace(aside, folder / SERVER)


def recorded_server(folder: Path) -> ServerConfig | None:
    """The configuration of the newest server on the folder; None if none left one, or one of another version of noria did."""
    try:
        return ServerConfig.model_validate_json((folder / SERVER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def clear(folder: Path, run_ids: Collection[str]) -> None:
    """Forget these runs, so that they can start anew: remove the database, logs, reports and their adapters, and nothing else.

    Raises StateConflictError if the folder is in use, is a file, or its database cannot be read or holds other runs too; StorageError.
    """
    database = folder / DATABASE
    with storing(folder):
        is_file, is_new = folder.exists() and not folder.is_dir(), not database.exists()
    if is_file:
        raise StateConflictError(f"{folder} is a file; choose another --state-dir")
    if is_new:
        return
    with exclusive(folder):
        others = sorted(_runs_of(database) - set(run_ids))
        if others:
            raise StateConflictError(f"{folder} holds other runs too ({', '.join(others)}) and is not cleared; choose another --state-dir")
        with storing(folder):
            for run_id in run_ids:
                shutil.rmtree(folder / ADAPTERS / run_id, ignore_errors=True)
            for name in (f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal", LOG, SERVER, *REPORTS, DATABASE):
                (folder / name).unlink(missing_ok=True)


def _runs_of(database: Path) -> set[str]:
    try:
        with closing(sqlite3.connect(database)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            return {run_id for (run_id,) in connection.execute("SELECT run_id FROM runs")} if "runs" in tables else set()
    except sqlite3.DatabaseError as error:
        raise StateConflictError(f"{database} cannot be read as a state database ({error}); choose another --state-dir") from error
