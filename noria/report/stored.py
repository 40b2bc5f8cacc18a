"""Runs as a state folder knows them, whether or not a server is using it. Deliberately light: the database, but no jax."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sqlalchemy import Connection

from noria.buffer import life
from noria.errors import StateConflictError
from noria.report.numbers import sparkline, task_name
from noria.service import store
from noria.service.archive import open_archive

NUM_SHOWN = 10
"""Newest versions that `show` lists."""

UNREADABLE = "unreadable"
"""Shown as the status of a run that another version of noria wrote."""

METRICS = {
    "reward": ("reward_mean", ".3f"),
    "staleness": ("staleness_max", ".0f"),
    "grad norm": ("grad_norm", ".3g"),
    "mismatch": ("mismatch_kl", ".2g"),
    "trained tokens": ("num_entries", ",.0f"),
    "nats a token": ("nll_mean", ".3f"),
}
"""Columns of `show`: a metric's stored name and its format. Those that no shown version has (a supervised phase's, say) are left out."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run with its versions and evaluations, oldest first. dropped: its dropped groups by reason."""

    row: store.RunRow
    versions: tuple[store.VersionRow, ...]
    evaluations: tuple[store.EvaluationRow, ...]
    tokens_sampled: int
    dropped: dict[str, int]

    @property
    def name(self) -> str:
        """Of the run."""
        return self.row.run_id

    @property
    def version(self) -> int:
        """The newest committed version."""
        return self.versions[-1].record.version if self.versions else 0

    @property
    def rewards(self) -> list[float]:
        """Mean raw reward of each trained batch, by step."""
        return [version.metrics["reward_mean"] for version in self.versions if "reward_mean" in version.metrics]


@dataclass(frozen=True, slots=True)
class UnreadableRun:
    """A run that another version of noria wrote: there, but closed to this one. error: why."""

    name: str
    error: StateConflictError


def read_runs(state_dir: Path) -> list[StoredRun | UnreadableRun]:
    """All runs of the folder, oldest first, read beside a server that may be at work; tables that are missing are made.

    One that cannot be read hides no other. Raises StateConflictError if it holds no state, or something else.
    """
    with open_archive(state_dir) as archive, archive.reading() as connection:
        return [run for name in archive.names() if (run := _read(connection, name)) is not None]


def find_stored(runs: Sequence[StoredRun | UnreadableRun], name: str) -> StoredRun:
    """The run of that name. Raises StateConflictError: there is none (with the names there are), or it cannot be read."""
    for run in runs:
        if run.name == name:
            if isinstance(run, UnreadableRun):
                raise run.error
            return run
    raise StateConflictError(f"there is no run {name!r} in this state folder; there are: {', '.join(run.name for run in runs) or 'none'}")


def _read(connection: Connection, name: str) -> StoredRun | UnreadableRun | None:
    try:
        row = store.find_run(connection, name)
    except StateConflictError as error:
        return UnreadableRun(name, error)
    if row is None:
        return None
    versions, evaluations = store.versions(connection, name), store.evaluations(connection, name)
    dropped = life.count_groups(connection, name).by_reason
    return StoredRun(row, tuple(versions), tuple(evaluations), store.tokens_sampled(connection, name), dropped)


def as_json(run: StoredRun | UnreadableRun, *, is_full: bool) -> dict[str, Any]:
    """A run as plain data; of one that cannot be read, that. is_full: with the metrics of every version and the settings."""
    if isinstance(run, UnreadableRun):
        return {"name": run.name, "status": UNREADABLE, "message": f"{run.error.code}: {run.error}"}
    config = run.row.config
    short = {
        "name": config.name,
        "tenant": config.tenant,
        "task": task_name(config),
        "status": run.row.status,
        "message": run.row.message,
        "version": run.version,
        "steps": config.num_steps,
        "reward": run.rewards[-1] if run.rewards else None,
        "evaluations": {str(evaluation.version): evaluation.accuracy for evaluation in run.evaluations},
        "pass_at": {str(e.version): {str(k): chance for k, chance in e.pass_at.items()} for e in run.evaluations if len(e.pass_at) > 1},
        "tokens_sampled": run.tokens_sampled,
        "dropped": run.dropped,
    }
    if not is_full:
        return short
    versions = [{"version": v.record.version, "committed_at_s": v.committed_at_s, "metrics": dict(v.metrics)} for v in run.versions]
    return short | {"versions": versions, "config": config.model_dump(mode="json")}


def list_table(runs: Sequence[StoredRun | UnreadableRun]) -> RenderableType:
    """One line per run, and what is wrong with those that cannot be read."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold dim")
    for heading in ("run", "tenant", "task", "status", "version", "reward", "accuracy"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for run in runs:
        if isinstance(run, UnreadableRun):
            table.add_row(Text(run.name, style="bold"), "", "", UNREADABLE)
            continue
        config = run.row.config
        accuracy = " → ".join(f"{evaluation.accuracy:.2f}" for evaluation in (run.evaluations[:1] + run.evaluations[1:][-1:]))
        reward = f"{run.rewards[-1]:.2f} {sparkline(run.rewards, 12)}" if run.rewards else ""
        version = f"{run.version}/{config.num_steps}"
        table.add_row(Text(config.name, style="bold"), config.tenant, task_name(config), run.row.status, version, reward, accuracy)
    problems = [Text(f"error[{run.error.code}]: {run.error}", style="yellow") for run in runs if isinstance(run, UnreadableRun)]
    return Group(table, *problems) if problems else table


def show_table(run: StoredRun) -> RenderableType:
    """The run's line, why it ended as it did, and its newest versions."""
    accuracies = {evaluation.version: _accuracy(evaluation) for evaluation in run.evaluations}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold dim", title_justify="left")
    versions = run.versions[-NUM_SHOWN:]
    columns = {heading: metric for heading, metric in METRICS.items() if any(metric[0] in version.metrics for version in versions)}
    for heading in ("version", "accuracy", *columns):
        table.add_column(heading, justify="right", no_wrap=True)
    for version in versions:
        number = version.record.version
        cells = (format(version.metrics[name], form) if name in version.metrics else "" for name, form in columns.values())
        table.add_row(str(number), accuracies.get(number, ""), *cells)
    parts: list[RenderableType] = [list_table([run])]
    if run.row.message:
        parts.append(Text(run.row.message, style="yellow"))
    return Group(*parts, Text(), table)


def _accuracy(evaluation: store.EvaluationRow) -> str:
    """The accuracy, and behind it pass@k for the largest k above 1."""
    k = max(evaluation.pass_at, default=1)
    return f"{evaluation.accuracy:.3f}" + (f" pass@{k} {evaluation.pass_at[k]:.3f}" if k > 1 else "")
