"""The state folder of a server: what lies in it, the lock that gives it to one process at a time, and its removal."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noria.errors import StateConflictError

DATABASE = "noria.sqlite"
"""Runs, versions, evaluations, groups (service/store.py, buffer/tables.py)."""

ADAPTERS = "adapters"
"""Committed adapter versions (adapters/versions.py)."""

LOG = "noria.log"
"""Structured logs, one JSON object a line."""

LOCK = "lock"
"""An empty file whose lock the serving process holds."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder, which is created if there is none: two servers on one folder would name two contents with one version.

    Raises StateConflictError if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StateConflictError(f"another process is using {folder}: stop it, or choose another --state-dir") from error
        yield


def remove(folder: Path) -> None:
    """Remove a state folder, if there is one. Raises StateConflictError if it is in use, or holds anything but a state."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    if DATABASE not in names and names - {LOCK, LOG}:
        raise StateConflictError(f"{folder} has no {DATABASE}, so it is no state folder and is not removed; choose another --state-dir")
    with exclusive(folder):
        shutil.rmtree(folder)
