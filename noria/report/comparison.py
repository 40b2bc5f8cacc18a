"""Runs side by side: rewards, accuracies, and the settings in which they differ. Plain data first, then a table of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from noria.errors import ConfigError
from noria.report.numbers import mean_reward, sparkline
from noria.report.stored import StoredRun
from noria.service.progress import REWARD_WINDOW

NAMES = ("name", "tenant")
"""Settings that always differ and say nothing."""


def compare(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """{"runs": one object per run, in the order given; "settings": {dotted key: value of each run} where not all are equal}.

    Raises ConfigError for fewer than two runs, or one named twice.
    """
    names = [run.row.run_id for run in runs]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"a comparison needs two or more different runs, got {', '.join(names) or 'none'}")
    settings = [flatten(run.row.config.model_dump(mode="json")) for run in runs]
    keys = dict.fromkeys(key for values in settings for key in values if key not in NAMES)
    found = {key: [values.get(key) for values in settings] for key in keys}
    differing = {key: values for key, values in found.items() if any(value != values[0] for value in values)}
    return {"runs": [_plain(run) for run in runs], "settings": differing}


def _plain(run: StoredRun) -> dict[str, Any]:
    rewards, best = run.rewards, max(run.evaluations, key=lambda e: (e.accuracy, e.mean_reward, -e.version), default=None)
    return {
        "name": run.row.run_id,
        "status": run.row.status,
        "version": run.version,
        "rewards": rewards,
        "reward_first5": mean_reward(rewards[:REWARD_WINDOW]),
        "reward_last5": mean_reward(rewards[-REWARD_WINDOW:]),
        "evaluations": {str(evaluation.version): evaluation.accuracy for evaluation in run.evaluations},
        "best_version": best.version if best else None,
        "best_accuracy": best.accuracy if best else None,
        "tokens_sampled": run.tokens_sampled,
        "seconds": run.versions[-1].committed_at_s - run.versions[0].committed_at_s if run.versions else 0.0,
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def table(compared: Mapping[str, Any]) -> RenderableType:
    """A comparison for people: a column per run."""
    runs = compared["runs"]
    shown = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold")
    shown.add_column("", style="dim")
    for run in runs:
        shown.add_column(run["name"], overflow="fold")
    rows = {
        "status": [run["status"] for run in runs],
        "version": [str(run["version"]) for run in runs],
        "rewards": [sparkline(run["rewards"], 20) for run in runs],
        "reward, first 5": [_number(run["reward_first5"]) for run in runs],
        "reward, last 5": [_number(run["reward_last5"]) for run in runs],
        "accuracy": [" → ".join(map(_number, _ends(list(run["evaluations"].values())))) for run in runs],
        "best accuracy": [f"{_number(run['best_accuracy'])} (version {run['best_version']})" if run["evaluations"] else "–" for run in runs],
        "tokens sampled": [f"{run['tokens_sampled']:,}" for run in runs],
        "time": [f"{run['seconds']:.0f} s" for run in runs],
    }
    for label, cells in rows.items():
        shown.add_row(label, *cells)
    settings = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, show_header=False)
    settings.add_column(style="dim")
    for key, values in compared["settings"].items():
        settings.add_row(key, *(str(value) for value in values))
    heading = "\nsettings that differ" if compared["settings"] else "\nno setting differs but the name"
    return Group(shown, Text(heading, style="bold"), settings)


def _ends(values: Sequence[float]) -> Sequence[float]:
    return [*values[:1], *values[1:][-1:]]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
