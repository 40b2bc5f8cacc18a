"""What outlives the process, beside the buffer: runs, their committed versions with metrics, and evaluations. SQLAlchemy Core, no logic.

`create_tables` is the one place that knows of databases of older releases: columns that came later are nullable, and are added when a file is opened.

Functions take the connection of a transaction that somebody else owns, so that a step's commit (version, settled groups) is one transaction.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from sqlalchemy import BigInteger, Column, Connection, Engine, Float, Integer, Row, String, Table, func, insert, inspect, select, update
from sqlalchemy.schema import CreateColumn

from noria.buffer.tables import GROUPS, METADATA
from noria.config import RunConfig
from noria.errors import StateConflictError
from noria.types import AdapterVersion

RUNNING, STOPPED, FINISHED, FAILED = "running", "stopped", "finished", "failed"
"""Statuses of a run. Running: a process works on it, or died while it did. Stopped: let go in order, to be resumed."""

RUNS = Table(
    "runs",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("config", String, nullable=False, doc="the run file as JSON"),
    Column("status", String, nullable=False),
    Column("message", String, nullable=False, default="", doc="why it failed, or finished early"),
    Column("created_at_s", Float, nullable=False, doc="Unix seconds"),
    Column("examples_sha256", String, doc="of the file of its supervised phase; null if it has none, and in rows of older releases"),
)

VERSIONS = Table(
    "versions",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("checksum", BigInteger, nullable=False),
    Column("moments_checksum", BigInteger, nullable=False),
    Column("path", String, nullable=False, doc="below the adapters' folder; retention may have removed it"),
    Column("committed_at_s", Float, nullable=False, doc="Unix seconds"),
    Column("metrics", String, nullable=False, doc="JSON object of numbers"),
)

EVALUATIONS = Table(
    "evaluations",
    METADATA,
    Column("run_id", String, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("accuracy", Float, nullable=False),
    Column("mean_reward", Float, nullable=False),
    Column("num_tasks", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("evaluated_at_s", Float, nullable=False, doc="Unix seconds"),
    Column("pass_at", String, doc="JSON object: pass@k by k; null in rows of older releases"),
)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as stored. examples_sha256: of the file of its supervised phase; None if it has none, and in rows of older releases."""

    run_id: str
    config: RunConfig
    status: str
    message: str
    examples_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A committed version. metrics: of the optimizer step that made it, empty for version 0."""

    record: AdapterVersion
    committed_at_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One held-out evaluation; numbers as in `actors.evaluation.EvaluationResult`. pass_at: empty in rows of older releases."""

    version: int
    accuracy: float
    mean_reward: float
    num_tasks: int
    num_failed: int
    pass_at: Mapping[int, float] = field(default_factory=dict)


def best_evaluation(rows: Iterable[EvaluationRow]) -> EvaluationRow | None:
    """The most accurate; of equals the one with the larger mean reward, then the oldest version. None of none."""
    return max(rows, key=lambda row: (row.accuracy, row.mean_reward, -row.version), default=None)


def create_tables(database: Engine) -> None:
    """Make the tables that are missing, and add the columns that a database of an older release lacks; what is there stays as it is."""
    with database.connect().execution_options(sqlite_begin="DEFERRED") as connection:
        if not any(_missing_columns(connection, table) for table in METADATA.sorted_tables):
            return  # nothing is written, so that whoever only reads holds no writer up
    quote = database.dialect.identifier_preparer.quote
    with database.begin() as connection:
        METADATA.create_all(connection)
        for table in METADATA.sorted_tables:
            for column in _missing_columns(connection, table):
                assert column.nullable, f"{table.name}.{column.name} came later: old rows have no value for it"
                connection.exec_driver_sql(f"ALTER TABLE {quote(table.name)} ADD COLUMN {CreateColumn(column).compile(database)}")


def _missing_columns(connection: Connection, table: Table) -> list[Column[Any]]:
    """The columns that the database lacks: all of them if it lacks the table."""
    found = inspect(connection)
    known = {column["name"] for column in found.get_columns(table.name)} if found.has_table(table.name) else set()
    return [column for column in table.columns if column.name not in known]


def create_run(connection: Connection, config: RunConfig, now_s: float, *, examples_sha256: str | None = None) -> None:
    """Record a new run. examples_sha256: of the file of its supervised phase, if it has one. Raises StateConflictError if the name is taken."""
    if find_run(connection, config.name) is not None:
        raise StateConflictError(f"run {config.name} exists already in this state folder: resume it, or choose another name or folder")
    row = {"run_id": config.name, "config": config.model_dump_json(), "status": RUNNING, "message": "", "created_at_s": now_s}
    connection.execute(insert(RUNS).values(**row, examples_sha256=examples_sha256))


def find_run(connection: Connection, run_id: str) -> RunRow | None:
    """The run, or None. Raises StateConflictError if another version of noria, with other settings, wrote it."""
    row = connection.execute(select(RUNS).where(RUNS.c.run_id == run_id)).one_or_none()
    if row is None:
        return None
    try:
        config = RunConfig.model_validate_json(row.config)
    except ValidationError as error:
        keys = ", ".join(".".join(map(str, item["loc"])) or item["msg"] for item in error.errors())
        raise StateConflictError(
            f"run {run_id} was written by another version of noria, and its settings cannot be read by this one ({keys}): use that version, or "
            "another state folder"
        ) from error
    return RunRow(row.run_id, config, row.status, row.message, row.examples_sha256)


def set_status(connection: Connection, run_id: str, status: str, message: str = "") -> None:
    """Change a run's status."""
    connection.execute(update(RUNS).where(RUNS.c.run_id == run_id).values(status=status, message=message))


def add_version(connection: Connection, record: AdapterVersion, metrics: Mapping[str, float], now_s: float) -> None:
    """Commit a version. Raises StateConflictError unless it is the next one: a version never goes back, and none names two contents."""
    newest = connection.execute(select(func.max(VERSIONS.c.version)).where(VERSIONS.c.run_id == record.run_id)).scalar()
    expected = 0 if newest is None else newest + 1
    if record.version != expected:
        raise StateConflictError(f"run {record.run_id}: version {record.version} cannot follow {newest}; the next one is {expected}")
    connection.execute(
        insert(VERSIONS).values(
            run_id=record.run_id,
            version=record.version,
            checksum=record.checksum,
            moments_checksum=record.moments_checksum,
            path=record.path,
            committed_at_s=now_s,
            metrics=json.dumps(dict(metrics)),
        )
    )


def versions(connection: Connection, run_id: str) -> list[VersionRow]:
    """All committed versions of the run, oldest first."""
    rows = connection.execute(select(VERSIONS).where(VERSIONS.c.run_id == run_id).order_by(VERSIONS.c.version))
    return [_version_row(row) for row in rows]


def _version_row(row: Row[Any]) -> VersionRow:
    record = AdapterVersion(row.run_id, row.version, row.checksum, row.moments_checksum, row.path)
    return VersionRow(record, row.committed_at_s, json.loads(row.metrics))


def add_evaluation(connection: Connection, run_id: str, row: EvaluationRow, now_s: float) -> None:
    """Record an evaluation, in place of an earlier one of the same version."""
    connection.execute(EVALUATIONS.delete().where(EVALUATIONS.c.run_id == run_id, EVALUATIONS.c.version == row.version))
    connection.execute(
        insert(EVALUATIONS).values(
            run_id=run_id,
            version=row.version,
            accuracy=row.accuracy,
            mean_reward=row.mean_reward,
            num_tasks=row.num_tasks,
            num_failed=row.num_failed,
            evaluated_at_s=now_s,
            pass_at=json.dumps(dict(row.pass_at)),
        )
    )


def evaluations(connection: Connection, run_id: str) -> list[EvaluationRow]:
    """All evaluations of the run, oldest version first."""
    rows = connection.execute(select(EVALUATIONS).where(EVALUATIONS.c.run_id == run_id).order_by(EVALUATIONS.c.version))
    return [_evaluation_row(row) for row in rows]


def _evaluation_row(row: Row[Any]) -> EvaluationRow:
    pass_at = {int(k): chance for k, chance in json.loads(row.pass_at or "{}").items()}
    return EvaluationRow(row.version, row.accuracy, row.mean_reward, row.num_tasks, row.num_failed, pass_at)


def tokens_sampled(connection: Connection, run_id: str) -> int:
    """Tokens sampled by all of the run's groups that became ready, whether trained or dropped later."""
    return int(connection.execute(select(func.coalesce(func.sum(GROUPS.c.num_sampled), 0)).where(GROUPS.c.run_id == run_id)).scalar_one())
