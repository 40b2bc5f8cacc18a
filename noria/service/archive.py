"""A state folder read without a server, beside one that may be at work: its runs, their versions, the episodes of their groups.

Nothing is written, with one exception: the tables and columns that a database of an older release lacks are added when it is opened. Deliberately not
here: what is shown of them (report/).
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import final

from sqlalchemy import Connection, Engine, select

from noria.adapters.versions import VersionFiles
from noria.buffer.database import open_database
from noria.buffer.sqlite import SettledGroup, SqliteBuffer
from noria.clock import RealClock
from noria.errors import ConfigError, StateConflictError, UnknownVersionError
from noria.service import store
from noria.service.folder import ADAPTERS, DATABASE


@final
class Archive:
    """The readable state of one folder. Made by `open_archive`; belongs to one thread."""

    def __init__(self, state_dir: Path, engine: Engine) -> None:
        self.state_dir, self._engine = state_dir, engine
        self.files = VersionFiles(state_dir / ADAPTERS)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that holds no writer up."""
        with self._engine.connect().execution_options(sqlite_begin="DEFERRED") as connection:
            yield connection

    def names(self) -> list[str]:
        """The runs, oldest first."""
        with self.reading() as connection:
            return list(connection.execute(select(store.RUNS.c.run_id).order_by(store.RUNS.c.created_at_s)).scalars())

    def run(self, name: str) -> store.RunRow:
        """The run of that name. Raises StateConflictError, with the names there are."""
        with self.reading() as connection:
            row = store.find_run(connection, name)
        if row is None:
            raise StateConflictError(f"there is no run {name!r} in this state folder; there are: {', '.join(self.names()) or 'none'}")
        return row

    def versions(self, name: str) -> list[store.VersionRow]:
        """All committed versions of the run, oldest first."""
        with self.reading() as connection:
            return store.versions(connection, name)

    def version(self, name: str, which: str) -> store.VersionRow:
        """A committed version: a number, "newest", or "best" by held-out accuracy, then mean reward, then age.

        Raises ConfigError for another word, UnknownVersionError if there is no such version.
        """
        rows = self.versions(name)
        if which == "newest" and rows:
            return rows[-1]
        number = self._best(name) if which == "best" else int(which) if which.isdecimal() else None
        if number is None:
            raise ConfigError(f'version must be a number, "best" or "newest" (got {which!r})')
        found = next((row for row in rows if row.record.version == number), None)
        if found is None:
            raise UnknownVersionError(f"run {name} has no version {number}; its newest is {rows[-1].record.version if rows else 'none'}")
        return found

    def settled(self, name: str, *, trained_version: int | None = None) -> list[SettledGroup]:
        """The run's settled groups with their episodes (`SqliteBuffer.settled`). Callable beside a running event loop."""
        buffer = SqliteBuffer(self._engine, RealClock())
        try:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(lambda: asyncio.run(buffer.settled(name, trained_version=trained_version))).result()
        finally:
            buffer.close()

    def _best(self, name: str) -> int:
        with self.reading() as connection:
            best = store.best_evaluation(store.evaluations(connection, name))
        if best is None:
            raise UnknownVersionError(f"run {name} has no evaluation yet, so no version of it is best; name one by its number")
        return best.version


@contextmanager
def open_archive(state_dir: Path) -> Iterator[Archive]:
    """The folder's archive; tables and columns that a database of an older release lacks are made.

    Raises StateConflictError if it holds no state, or something else.
    """
    path = state_dir / DATABASE
    try:
        is_state = path.is_file()
    except (OSError, ValueError) as error:  # no permission, too long a name, a NUL
        raise StateConflictError(f"cannot read {str(state_dir)[:200]}: {error}; name a state folder with --state-dir") from error
    if not is_state:
        raise StateConflictError(f"{state_dir} is no state folder: it has no {DATABASE}; name one with --state-dir")
    engine = open_database(path)
    try:
        store.create_tables(engine)
        yield Archive(state_dir, engine)
    finally:
        engine.dispose()
