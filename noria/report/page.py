"""`report.html`: one self-contained page about a finished session, readable in light and dark, without scripts and without the network."""

import base64
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from noria.observe import write_chrome_trace
from noria.report.curves import DARK, draw_curves, draw_timeline
from noria.report.files import write_aside
from noria.report.numbers import task_name
from noria.report.session import TIMELINE_S
from noria.report.summary import SessionReport
from noria.service.build import RunReport
from noria.service.folder import REPORTS
from noria.storage import storing

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --faint: #656d76; --line: #e5e8eb; --bad: #b42318; --good: #1a7f37; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15191e; --text: #e6edf3; --faint: #93a1ae; --line: #2a3138; --bad: #ff8a7a; --good: #56d364; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 76rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .5rem; }
p { margin: 0 0 .75rem; }
.faint { color: var(--faint); }
.facts { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 1.25rem 0 0; padding: 0; list-style: none; }
.facts b { display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { color: var(--faint); font-weight: 500; font-size: .85rem; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); }
.good { color: var(--good); font-weight: 600; }
img { max-width: 100%; height: auto; }
details { border-bottom: 1px solid var(--line); padding: .5rem 0; }
summary { cursor: pointer; }
details table { width: auto; margin: .5rem 0 .5rem 1rem; }
details td { border: 0; padding: .05rem 1.5rem .05rem 0; font-family: ui-monospace, monospace; font-size: .85rem; }
"""

LEGEND = (
    "Rewards are the mean raw rewards of each step's batch. Held-out tasks are never trained on. "
    "Staleness: optimizer steps between the oldest sampled token of a batch and its training; dashed, the run's bound."
)

COLUMNS = (
    ("run", ""),
    ("tenant", ""),
    ("task", ""),
    ("rank", "number"),
    ("rate", "number"),
    ("version", "number"),
    ("held-out accuracy", "number"),
    ("reward, first 5", "number"),
    ("last 5", "number"),
    ("staleness", "number"),
    ("dropped stale", "number"),
    ("tokens sampled", "number"),
    ("trained", "number"),
    ("status", ""),
)


def write_report(report: SessionReport, summary: Mapping[str, Any], folder: Path) -> tuple[Path, Path, Path]:
    """Write the page, its curves for other pages, and the timeline for a trace viewer; their paths. summary: of the same session."""
    curves = draw_curves(report)
    page = render_page(report, summary, curves)
    html, png, timeline = REPORTS
    with storing(folder / timeline):
        write_chrome_trace(folder / timeline, report.spans)
    return write_aside(folder / html, page.encode()), write_aside(folder / png, curves), folder / timeline


def render_page(report: SessionReport, summary: Mapping[str, Any], curves: bytes) -> str:
    """The page; also well-formed XML. curves: the light picture of `draw_curves`."""
    timeline = _picture(draw_timeline(report, TIMELINE_S), draw_timeline(report, TIMELINE_S, DARK), "work of each stage over time")
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>noria: {escape(', '.join(run.config.name for run in report.runs))}</title><style>{STYLE}</style></head><body>",
            f'<h1>noria</h1><p class="faint">{len(report.runs)} runs on one resident base, {escape(report.base)}</p>',
            _facts(report, summary),
            "<h2>Runs</h2>",
            _runs_table(report, summary),
            _problems(report),
            "<h2>Curves</h2>",
            _picture(curves, draw_curves(report, DARK), "reward, held-out accuracy and staleness of each run"),
            f'<p class="faint">{escape(LEGEND)}</p>',
            f"<h2>Stages, the {TIMELINE_S:g} seconds before the last optimizer step</h2>",
            timeline,
            '<p class="faint">Busy: the fraction of the time from the start of the server to the end of the last run in which a stage worked.</p>',
            "<h2>Settings</h2>",
            *(_settings(run) for run in report.runs),
            "</body></html>",
            "",
        )
    )


def _facts(report: SessionReport, summary: Mapping[str, Any]) -> str:
    facts = [
        (f"{summary['wall_s']:.0f} s", "from the command to the end"),
        (f"{report.window_s:.0f} s", "training and evaluation"),
        (f"{summary['sampler_busy']:.0%}", "sampler busy"),
        (f"{summary['learner_busy']:.0%}", "learner busy"),
        (f"{sum(run.tokens_sampled for run in report.runs):,}", "tokens sampled"),
        (f"{sum(run.progress.tokens_trained for run in report.runs):,}", "tokens trained"),
    ]
    if summary["install_s"]:
        facts.insert(0, (f"{summary['install_s']:.0f} s", "installation"))
    return f'<ul class="facts">{"".join(f"<li><b>{value}</b>{label}</li>" for value, label in facts)}</ul>'


def _runs_table(report: SessionReport, summary: Mapping[str, Any]) -> str:
    head = "".join(f'<th class="{kind}">{name}</th>' if kind else f"<th>{name}</th>" for name, kind in COLUMNS)
    rows = [_row(_cells(run, numbers)) for run, numbers in zip(report.runs, summary["runs"], strict=True)]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _cells(run: RunReport, numbers: Mapping[str, Any]) -> Iterable[str]:
    config = run.config
    before, after = numbers["eval_before"], numbers["eval_after"]
    accuracy = f"{_number(before)} → {_number(after)}"
    is_better = before is not None and after is not None and after > before
    return (
        f"<b>{escape(config.name)}</b>",
        escape(config.tenant),
        escape(task_name(config)),
        str(config.adapter.rank),
        f"{config.adapter.learning_rate:g}",
        f"{numbers['version']}/{config.num_steps}",
        f'<span class="good">{accuracy}</span>' if is_better else accuracy,
        _number(numbers["reward_first5"]),
        _number(numbers["reward_last5"]),
        f"{numbers['max_staleness_seen']}/{numbers['max_staleness']}",
        str(numbers["dropped_stale"]),
        f"{numbers['tokens_sampled']:,}",
        f"{numbers['tokens_trained']:,}",
        escape(run.progress.status),
    )


def _row(cells: Iterable[str]) -> str:
    kinds = (kind for _, kind in COLUMNS)
    marked = (f'<td class="{kind}">{cell}</td>' if kind else f"<td>{cell}</td>" for cell, kind in zip(cells, kinds, strict=True))
    return f"<tr>{''.join(marked)}</tr>"


def _problems(report: SessionReport) -> str:
    """What went wrong or ended early, one line per run."""
    messages = [(run.config.name, run.progress.message) for run in report.runs if run.progress.message]
    return "".join(f'<p class="bad"><b>{escape(name)}</b>: {escape(message)}</p>' for name, message in messages)


def _settings(run: RunReport) -> str:
    config = run.config.model_dump(mode="json")
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in _flatten(config))
    return f"<details><summary>{escape(run.config.name)}</summary><table><tbody>{rows}</tbody></table></details>"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", repr(value) if isinstance(value, str | list) else str(value)


def _picture(light: bytes, dark: bytes, text: str) -> str:
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_data_url(dark)}"/>'
        f'<img src="{_data_url(light)}" alt="{escape(text)}"/></picture>'
    )


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
