"""Pictures of a session: reward curves with evaluations and staleness, and the stages' timeline. The only file that loads matplotlib.

Figures are drawn straight on an Agg canvas: no pyplot, no global state, no display.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from noria.observe import Span
from noria.report.numbers import moving_mean, task_name
from noria.report.stored import StoredRun
from noria.report.summary import SessionReport
from noria.service.build import RunReport
from noria.service.progress import REWARD_WINDOW

DPI = 150
MAX_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a picture: page, text, secondary text, grid; reward curve; evaluation; staleness; one per kind of work."""

    page: str
    text: str
    faint: str
    grid: str
    reward: str
    evaluation: str
    staleness: str
    kinds: tuple[str, ...]


LIGHT = Theme(
    page="#ffffff",
    text="#1f2328",
    faint="#656d76",
    grid="#e5e8eb",
    reward="#1668a8",
    evaluation="#c2410c",
    staleness="#7c8894",
    kinds=("#1668a8", "#7ab4dd", "#c2410c", "#eda16f", "#6d8b3a", "#8b5fa8", "#3f8f87", "#b9a23c"),
)
DARK = Theme(
    page="#15191e",
    text="#e6edf3",
    faint="#93a1ae",
    grid="#2a3138",
    reward="#6cb6f0",
    evaluation="#ff9b5e",
    staleness="#7d8b99",
    kinds=("#4f9bd9", "#a9d2f2", "#f08a4b", "#f7c49b", "#9cbb63", "#b58fd0", "#62b8ae", "#d8c25e"),
)

STAGE_LABELS: Mapping[str, str] = {"sampler": "sampler", "learner": "learner", "adapters": "publish", "actor": "actors"}


def draw_curves(report: SessionReport, theme: Theme = LIGHT) -> bytes:
    """A PNG of `runs_figure`."""
    return _png(runs_figure(report.runs, theme))


def runs_figure(runs: Sequence[RunReport], theme: Theme = LIGHT, *, make: type[Figure] = Figure) -> Figure:
    """One panel per run: rewards by step, their mean over five steps, held-out accuracy, and the staleness of each step below.

    make: the figure's class.
    """
    num_columns = min(MAX_COLUMNS, max(1, len(runs)))
    num_rows = max(1, math.ceil(len(runs) / num_columns))
    with rc_context(_style(theme)):
        figure = make(figsize=(max(6.0, 0.6 + 3.9 * num_columns), 0.5 + 3.3 * num_rows), layout="constrained")
        grid = figure.add_gridspec(2 * num_rows, num_columns, height_ratios=[4.2, 1] * num_rows)
        low, high = _reward_range(runs)
        for index, run in enumerate(runs):
            row, column = divmod(index, num_columns)
            above = figure.add_subplot(grid[2 * row, column])
            below = figure.add_subplot(grid[2 * row + 1, column], sharex=above)
            _draw_rewards(above, run, theme)
            above.set_ylim(low, high)
            _draw_staleness(below, run, theme)
            if column == 0:
                above.set_ylabel("reward, accuracy")
                below.set_ylabel("staleness")
        if runs:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        FigureCanvasAgg(figure)
        return figure


def draw_comparison(runs: Sequence[StoredRun], theme: Theme = LIGHT) -> bytes:
    """A PNG with all runs in one panel, a colour each: rewards, their mean over five steps, and diamonds for held-out accuracy."""
    with rc_context(_style(theme)):
        figure = Figure(figsize=(8.0, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for index, run in enumerate(runs):
            color, first = theme.kinds[index % len(theme.kinds)], 1 + run.row.config.num_supervised_steps
            steps = range(first, first + len(run.rewards))
            axes.plot(steps, run.rewards, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, moving_mean(run.rewards, REWARD_WINDOW), color=color, linewidth=2, label=run.row.run_id)
            accuracies = [e.accuracy for e in run.evaluations]
            axes.plot([e.version for e in run.evaluations], accuracies, color=color, linestyle=":", linewidth=1, marker="D", markersize=5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.set_xlabel("version")
        axes.set_ylabel("reward; diamonds: held-out accuracy")
        axes.legend(frameon=False)
        return _png(figure)


def draw_timeline(report: SessionReport, length_s: float, theme: Theme = LIGHT) -> bytes:
    """A PNG with one row per stage and a bar for every stretch of work in the `length_s` seconds before end_s, coloured by kind; waits are blank."""
    spans = [span for span in report.spans if not span.is_wait and span.stage in STAGE_LABELS]
    stages = [stage for stage in STAGE_LABELS if any(span.stage == stage for span in spans)]
    kinds = sorted({(list(STAGE_LABELS).index(span.stage), span.name) for span in spans})
    colors = {kind: theme.kinds[i % len(theme.kinds)] for i, kind in enumerate(kinds)}
    with rc_context(_style(theme)):
        figure = Figure(figsize=(12.3, 1.0 + 0.5 * max(1, len(stages))), layout="constrained")
        axes = figure.add_subplot()
        for row, stage in enumerate(stages):
            for kind in kinds:
                bars = [_bar(span, report.end_s, length_s) for span in spans if span.stage == stage and (kind[1] == span.name)]
                axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=colors.get(kind, theme.faint), linewidth=0)
        axes.set_yticks(range(len(stages)), [STAGE_LABELS[stage] for stage in stages])
        axes.set_ylim(max(1, len(stages)) - 0.5, -0.5)
        axes.set_xlim(-length_s, 0)
        axes.set_xlabel("seconds")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        if kinds:
            handles = [Patch(color=colors[kind], label=kind[1]) for kind in kinds]
            figure.legend(handles=handles, loc="outside upper center", ncols=len(kinds), frameon=False)
        return _png(figure)


def _draw_rewards(axes: Any, run: RunReport, theme: Theme) -> None:
    config, rewards = run.config, run.progress.rewards
    first = 1 + config.num_supervised_steps
    steps = range(first, first + len(rewards))
    axes.plot(steps, rewards, color=theme.reward, alpha=0.35, linewidth=1, marker=".", markersize=3.5, label="reward of a step")
    means = moving_mean(rewards, REWARD_WINDOW)
    axes.plot(steps, means, color=theme.reward, linewidth=2, label=f"mean of {REWARD_WINDOW} steps")
    points = sorted(run.progress.evaluations.items())
    line = ":" if len(points) > 2 else "none"
    versions, accuracies = [version for version, _ in points], [accuracy for _, accuracy in points]
    style = {"color": theme.evaluation, "linestyle": line, "linewidth": 1, "marker": "D", "markersize": 5.5}
    axes.plot(versions, accuracies, label="held-out accuracy", **style)
    for version, accuracy in points[:1] + points[1:][-1:]:
        is_first = version == points[0][0]
        axes.annotate(
            f"{accuracy:.2f}",
            (version, accuracy),
            xytext=(5, -14) if is_first else (-5, 8),
            textcoords="offset points",
            ha="left" if is_first else "right",
            color=theme.evaluation,
            fontweight="bold",
            path_effects=[withStroke(linewidth=3, foreground=theme.page)],
        )
    axes.set_xlim(-0.04 * config.num_steps, 1.04 * max(1, config.num_steps))
    axes.tick_params(labelbottom=False)
    axes.set_title(config.name if config.name == task_name(config) else f"{config.name} ({task_name(config)})", loc="left", fontweight="bold")
    axes.set_title(f"{config.tenant} · rank {config.adapter.rank} · lr {config.adapter.learning_rate:g}", loc="right", fontsize=8, color=theme.faint)


def _draw_staleness(axes: Any, run: RunReport, theme: Theme) -> None:
    bound = run.config.algorithm.max_staleness
    staleness = [metrics.get("staleness_max", 0.0) for metrics in run.metrics]
    axes.bar(range(1, len(staleness) + 1), staleness, width=0.7, color=theme.staleness)
    axes.axhline(bound, color=theme.evaluation, linewidth=1, linestyle="--")
    axes.text(1, bound, "bound", transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=7, color=theme.evaluation)
    axes.set_ylim(0, max([1, bound, *staleness]) * 1.7)
    axes.set_yticks([0, max(1, bound)])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel("version")


def _bar(span: Span, end_s: float, length_s: float) -> tuple[float, float]:
    """(left, width), in seconds relative to the end, cut to the window."""
    left, right = max(span.start_s - end_s, -length_s), min(span.end_s - end_s, 0.0)
    return left, max(0.0, right - left)


def _reward_range(runs: Sequence[RunReport]) -> tuple[float, float]:
    """One scale for all panels, which holds 0 and 1."""
    values = [0.0, 1.0]
    for run in runs:
        values += run.progress.rewards
        values += run.progress.evaluations.values()
    margin = 0.04 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin


def _style(theme: Theme) -> dict[str, Any]:
    return {
        "font.size": 9,
        "font.family": "DejaVu Sans",
        "figure.facecolor": theme.page,
        "axes.facecolor": theme.page,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.faint,
        "axes.titlesize": 10,
        "axes.titlecolor": theme.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "text.color": theme.text,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
    }


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
