"""What is shown while a session runs: a table that is redrawn in place on a terminal, or a line per step anywhere else.

Deliberately not here: where the numbers come from (session.py), and what remains after the end (page.py, summary.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TextIO, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from noria.config import RunConfig
from noria.report.numbers import mean_reward, reward_at, sparkline, task_name
from noria.service import store
from noria.service.progress import REWARD_WINDOW, RunProgress

WIDE = 110
"""From so many columns on there is room for the run's name beside its task, and for longer curves."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The session now. doing: what it waits for before training, else empty. busy: by stage, of the last seconds. Rates in tokens a second."""

    elapsed_s: float
    runs: Sequence[tuple[RunConfig, RunProgress]]
    doing: str = ""
    sampled_per_s: float = 0.0
    trained_per_s: float = 0.0
    busy: Mapping[str, float] = field(default_factory=dict)


class Display(Protocol):
    """Shows snapshots; called from the event loop."""

    def show(self, snapshot: Snapshot) -> None:
        """Replace what was shown before."""

    def close(self) -> None:
        """Leave the terminal as it should be. Idempotent; nothing is shown afterwards."""


@final
class LiveTable:
    """A table on a terminal, redrawn in place; the last one stays."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw."""
        if self._live.is_started:
            self._live.update(render(snapshot, self._live.console.width), refresh=True)

    def close(self) -> None:
        """Leave the last table on the screen and show the cursor again."""
        self._live.stop()


@final
class Lines:
    """A line per step and per evaluation, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, tuple[str, int, dict[int, float]]] = {}
        self._doing = ""

    def show(self, snapshot: Snapshot) -> None:
        """Write what is new."""
        if snapshot.doing != self._doing:
            self._doing = snapshot.doing
            if self._doing:
                self._write(snapshot, self._doing)
        for config, progress in snapshot.runs:
            self._show_run(snapshot, config, progress)

    def close(self) -> None:
        """Nothing to do."""

    def _show_run(self, snapshot: Snapshot, config: RunConfig, progress: RunProgress) -> None:
        status, version, evaluations = self._shown.get(config.name, (store.RUNNING, 0, {}))
        for evaluated in sorted(progress.evaluations.keys() - evaluations.keys()):
            self._write(snapshot, f"{config.name}  held-out accuracy at version {evaluated}: {progress.evaluations[evaluated]:.3f}")
        for step in range(version + 1, progress.version + 1):
            self._write(snapshot, _step_line(config, progress, step))
        if progress.status != status:
            self._write(snapshot, f"{config.name}  {progress.status}" + (f": {progress.message}" if progress.message else ""))
        self._shown[config.name] = (progress.status, progress.version, dict(progress.evaluations))

    def _write(self, snapshot: Snapshot, text: str) -> None:
        self._stream.write(f"[{_duration(snapshot.elapsed_s)}] {text}\n")
        self._stream.flush()


def _step_line(config: RunConfig, progress: RunProgress, version: int) -> str:
    if version <= config.num_supervised_steps:
        number = f"supervised, {_number(progress.supervised_losses[version - 1])} nats a token"
    else:
        number = f"reward {_number(reward_at(config, progress.rewards, version))}"
    return f"{config.name}  step {version}/{config.num_steps}  {number}"


def render(snapshot: Snapshot, width: int) -> RenderableType:
    """The table of runs, the stages below it, and what went wrong. width: in columns, at least 80."""
    parts: list[RenderableType] = [_runs_table(snapshot.runs, width), _stages(snapshot, width)]
    for config, progress in snapshot.runs:
        if progress.message:
            parts.append(Text(f"{config.name}: {progress.message}", style="red" if progress.status == store.FAILED else "yellow"))
    return Group(*parts)


def _runs_table(runs: Sequence[tuple[RunConfig, RunProgress]], width: int) -> Table:
    is_wide = width >= WIDE
    gap, sparks = (2, 20) if is_wide else (1, 12)
    names = [(config.name, config.tenant, task_name(config)) if is_wide else (config.tenant, task_name(config)) for config, _ in runs]
    headings = ("run", "tenant", "task") if is_wide else ("tenant", "task")
    steps = [_step(config, progress) for config, progress in runs]
    numbers = {"rank": 4, "step": max([4, *map(len, steps)]), "reward": sparks + 5, "held-out": 11, "stale": 5, "groups": 6}
    room = width - sum(numbers.values()) - gap * (len(headings) + len(numbers) - 1)
    widths = _shrink([max(map(len, column)) for column in zip(headings, *names, strict=True)], room)
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold dim")
    for heading, column_width in zip(headings, widths, strict=True):
        is_key = heading == ("run" if is_wide else "task")
        table.add_column(heading, width=column_width, no_wrap=True, overflow="ellipsis", style="bold" if is_key else "")
    for heading, column_width in numbers.items():
        table.add_column(heading, width=column_width, no_wrap=True, justify="left" if heading in ("reward", "held-out") else "right")
    for (config, progress), step, texts in zip(runs, steps, names, strict=True):
        staleness = f"{progress.staleness}/{config.algorithm.max_staleness}"
        reward, held_out = _reward(progress.rewards, sparks), _held_out(config, progress)
        table.add_row(*texts, str(config.adapter.rank), step, reward, held_out, staleness, str(progress.num_outstanding))
    return table


def _shrink(widths: list[int], room: int) -> list[int]:
    """The widths, the longest made shorter until all fit in `room`; none below 4."""
    while sum(widths) > room and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    return widths


def _step(config: RunConfig, progress: RunProgress) -> Text:
    style = {store.FAILED: "red", store.FINISHED: "green"}.get(progress.status, "")
    return Text(f"{progress.version}/{config.num_steps}", style=style)


def _reward(rewards: Sequence[float], width: int) -> Text:
    text = Text(f"{_number(mean_reward(rewards[-REWARD_WINDOW:])):>4} ")
    return text.append(sparkline(rewards, width), style="cyan")


def _held_out(config: RunConfig, progress: RunProgress) -> Text:
    if not config.evaluation.num_tasks:
        return Text("off", style="dim")
    before, after = progress.evaluations.get(0), progress.evaluations.get(config.num_steps)
    text = Text(_number(before))
    text.append(" → ", style="dim")
    return text.append(_number(after), style="" if after is None else "bold green" if after > (before or 0.0) else "bold")


def _stages(snapshot: Snapshot, width: int) -> RenderableType:
    if snapshot.doing:
        return Text(f"\n{snapshot.doing} … {_duration(snapshot.elapsed_s)}", style="dim")
    bar_width = 12 if width >= WIDE else 8
    grid = Table.grid(*(Column(no_wrap=True) for _ in range(9)), padding=(0, 1, 0, 0))
    cells: list[RenderableType] = []
    for label, stage in (("sampler", "sampler"), ("learner", "learner"), ("actors", "actor")):
        busy = snapshot.busy.get(stage, 0.0)
        cells += [
            Text(label, style="dim"),
            ProgressBar(total=1.0, completed=busy, width=bar_width, complete_style="cyan", finished_style="cyan"),
            Text(f"{busy:4.0%}  "),
        ]
    grid.add_row(*cells)
    rates = (
        f"sampled {snapshot.sampled_per_s:,.0f} tokens/s   trained {snapshot.trained_per_s:,.0f} tokens/s   elapsed {_duration(snapshot.elapsed_s)}"
    )
    return Group(Text(), grid, Text(rates, style="dim"))


def _number(value: float | None) -> str:
    return "…" if value is None else f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
