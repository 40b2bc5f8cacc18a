"""The state database: one SQLite file that survives a power cut, written by one thread at a time."""

from pathlib import Path
from sqlite3 import Connection as SqliteConnection

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError

from noria.errors import StateConflictError
from noria.storage import storing

BUSY_TIMEOUT_S = 5.0
"""How long a writer waits for another process's transaction before it fails."""


def open_database(path: Path) -> Engine:
    """The engine of the SQLite file at `path`, which is created with its folder if there is none. Close it with `engine.dispose()`.

    Every transaction starts with BEGIN IMMEDIATE, so that what it reads cannot change before it writes; a reader that must not hold writers
    up asks for `connection.execution_options(sqlite_begin="DEFERRED")`. Journal: write-ahead, synchronous FULL: a commit that returned is on disk.

    Raises StateConflictError if the file is not a database, or is locked by another process.
    """
    with storing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    try:
        with engine.begin():
            pass
    except DatabaseError as error:
        engine.dispose()
        raise StateConflictError(f"cannot use {path} as the state database: {error.orig}") from error
    return engine


def _configure(connection: SqliteConnection, _record: object) -> None:
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('sqlite_begin', 'IMMEDIATE')}")
