"""The command line: arguments in, exit codes out. What commands do lives below; they import it inside, so that `noria --help` stays light.

Exit codes: 0 all went well; 1 a run failed; 2 the command or a file could not be used; 130 stopped by a signal.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from noria.errors import NoriaError
from noria.service import folder

if TYPE_CHECKING:
    from noria.report.live import Display
    from noria.report.plan import Plan
    from noria.report.summary import SessionReport

FAILED, UNUSABLE, STOPPED = 1, 2, 130

EXIT_CODES = "Exit codes: 0 all went well, 1 a run failed, 2 the command or a file cannot be used, 130 stopped (go on with --resume)."

IMPORTED_S = time.monotonic()


def _examples(*commands: str) -> str:
    """An epilog: each command on its own line (typer makes one line break of two), then the exit codes."""
    return "\n\n".join(("Examples:", *commands, EXIT_CODES))


app = typer.Typer(
    help="Reinforcement-learning post-training of language models, for many users at once.",
    epilog=_examples("noria demo", "noria train my_run.toml", "noria runs list --state-dir .noria/demo", "noria demo --help"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
runs_app = typer.Typer(help="Look at the runs of a state folder.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the runs in the state folder, from their newest committed versions.")]
Json = Annotated[bool, typer.Option("--json", help="No table: progress goes to stderr, and the last line on stdout is one JSON object.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html and curves.png into the state folder at the end.")]
Steps = Annotated[int | None, typer.Option(min=1, metavar="N", help="Optimizer steps of every run, instead of its file's.")]
ServerFile = Annotated[Path | None, typer.Option(metavar="SERVER.toml", help="Server file. Without one, base and sizes follow the runs.")]
StateDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of database, adapters and reports.", show_default=".noria")]


def main() -> None:
    """Entry point of the `noria` command."""
    app()


@app.command(epilog=_examples("noria demo", "noria demo --steps 5", "noria demo --resume", "noria demo --json | tail -n 1 | jq .runs"))
def demo(
    *,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the demo's state.", show_default=".noria/demo")] = None,
    resume: Resume = False,
    as_json: Json = False,
    steps: Steps = None,
    install_s: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Seconds the installation took, for the report.", show_default="$NORIA_INSTALL_S, else 0")
    ] = None,
    report: Report = True,
) -> None:
    """Train three tenants' runs on one model at once, and draw their reward curves: minutes on a laptop, no accelerator needed.

    Three tasks, three adapters of different rank and learning rate, one resident base of 135 M parameters. The table shows, for each run, its step,
    its reward, its accuracy on held-out problems before and after, and how stale its data are. Without --resume the previous demo is removed first.
    """
    with _refusals():
        from noria.config import install_seconds
        from noria.report.plan import demo_plan

        install_s = install_seconds() if install_s is None else install_s
        plan = demo_plan(state_dir=state_dir, resume=resume, steps=steps)
        if not resume:
            folder.clear(plan.state_dir, [run.config.name for run in plan.runs])
        _train(plan, as_json=as_json, report=report, install_s=install_s)


@app.command(epilog=_examples("noria train my_run.toml", "noria train a.toml b.toml --state-dir runs", "noria train my_run.toml --resume"))
def train(
    *,
    run_files: Annotated[list[Path], typer.Argument(metavar="RUN.toml...", help="Run files; all with the same base.")],
    server_config: ServerFile = None,
    state_dir: StateDir = None,
    resume: Resume = False,
    as_json: Json = False,
    steps: Steps = None,
    report: Report = True,
) -> None:
    """Train the runs of one or more run files on one resident base, at once.

    Environments named "file.py:Class" are looked for beside their run file.
    """
    with _refusals():
        from noria.config import install_seconds
        from noria.report.plan import train_plan

        plan = train_plan(run_files, server_config=server_config, state_dir=state_dir, resume=resume, steps=steps)
        _train(plan, as_json=as_json, report=report, install_s=install_seconds())


class Bench(StrEnum):
    """What `noria bench` can measure."""

    STEP = "step"


@app.command(epilog=_examples("noria bench step --json"))
def bench(
    *,
    name: Annotated[Bench, typer.Argument(help="What to measure: `step`, a training and a decode step against their matrix products.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on one line, last.")] = False,
) -> None:
    """Measure noria on this machine; every ratio is taken in one run. Minutes."""
    with _refusals():
        import json

        from noria.bench.step import measure, table

        result = {Bench.STEP: measure}[name]()
        if as_json:
            typer.echo(json.dumps(result))
        else:
            from rich.console import Console

            Console().print(table(result))


@runs_app.command("list", epilog=_examples("noria runs list --state-dir .noria/demo"))
def list_runs(*, state_dir: StateDir = None, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """List the runs of a state folder."""
    with _refusals():
        import json

        from rich.console import Console

        from noria.report import stored

        runs = stored.read_runs(state_dir or Path(".noria"))
        if as_json:
            typer.echo(json.dumps([stored.as_json(run, is_full=False) for run in runs]))
        else:
            Console().print(stored.list_table(runs))


@runs_app.command("show", epilog=_examples("noria runs show largest --state-dir .noria/demo --json"))
def show_run(
    *,
    name: Annotated[str, typer.Argument(help="The run's name.")],
    state_dir: StateDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, with every version's metrics and the settings.")] = False,
) -> None:
    """Show one run: its versions, rewards and evaluations."""
    with _refusals():
        import json

        from rich.console import Console

        from noria.report import stored

        run = stored.find_stored(stored.read_runs(state_dir or Path(".noria")), name)
        if as_json:
            typer.echo(json.dumps(stored.as_json(run, is_full=True)))
        else:
            Console().print(stored.show_table(run))


@app.command()
def version() -> None:
    """Print noria's version, and those of what it computes with."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        own = version_of("noria")
    except PackageNotFoundError:
        own = "(a source tree that is not installed)"
    packages = ", ".join(f"{name} {version_of(name)}" for name in ("jax", "jaxlib", "numpy"))
    typer.echo(f"noria {own}, Python {sys.version.split()[0]}, {packages}")


def _train(plan: "Plan", *, as_json: bool, report: bool, install_s: float) -> None:
    """Train a plan's runs, show it, report it, and exit with what came of it."""
    import asyncio
    import json

    from noria.report.session import train, until_stopped
    from noria.report.summary import summarize

    with _logging_to(plan.state_dir):
        display = _display(as_json)

        def announce() -> None:
            display.close()
            typer.echo("stopping in order; once more to stop at once", err=True)

        try:
            session = asyncio.run(until_stopped(train(plan, display, elapsed_s), announce))
        finally:
            display.close()
    if session is None:
        typer.echo("stopped; resume with --resume", err=True)
        raise typer.Exit(STOPPED)
    try:
        if report:
            _write_report(session, plan, install_s, is_quiet=as_json)
    finally:  # a report that cannot be written does not swallow the result
        summary = summarize(session, install_s=install_s, wall_s=elapsed_s())
        if as_json:
            typer.echo(json.dumps(summary, allow_nan=False))
        else:
            busy = f"sampler busy {summary['sampler_busy']:.0%}, learner busy {summary['learner_busy']:.0%}"
            typer.echo(f"{busy}; {summary['wall_s']:.1f} s from the command to the end")
        for name, error in session.failures.items():
            _print_error(error, about=name)
    if session.failures:
        raise typer.Exit(FAILED)


def _display(as_json: bool) -> "Display":
    from rich.console import Console

    from noria.report.live import Lines, LiveTable

    if as_json:
        return Lines(sys.stderr)
    console = Console()
    return LiveTable(console) if console.is_terminal else Lines(sys.stdout)


def _write_report(session: "SessionReport", plan: "Plan", install_s: float, *, is_quiet: bool) -> None:
    from noria.report.page import write_report
    from noria.report.summary import summarize

    for path in write_report(session, summarize(session, install_s=install_s, wall_s=elapsed_s()), plan.state_dir):
        typer.echo(f"{path}", err=is_quiet)


@contextmanager
def _logging_to(state_dir: Path) -> Iterator[None]:
    """Logs go into a file of the state folder, since the screen belongs to the table."""
    from noria.observe import configure_logging

    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / folder.LOG).open("a", encoding="utf-8") as stream:
        configure_logging(as_json=True, stream=stream)
        try:
            yield
        finally:
            configure_logging()


@contextmanager
def _refusals() -> Iterator[None]:
    """What noria refuses becomes one line and exit code 2; SIGINT or SIGTERM outside training becomes 130."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except NoriaError as error:
        _print_error(error)
        raise typer.Exit(UNUSABLE) from error
    except KeyboardInterrupt as error:
        typer.echo("stopped", err=True)
        raise typer.Exit(STOPPED) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _print_error(error: BaseException, *, about: str = "") -> None:
    code = error.code if isinstance(error, NoriaError) else "unexpected"
    text = str(error) if isinstance(error, NoriaError) else f"{type(error).__name__}: {error}"
    typer.echo(f"error[{code}]: " + (text if about in text else f"{about}: {text}"), err=True)


def elapsed_s() -> float:
    """Seconds since the process began; where the system does not say, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): clock ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - IMPORTED_S


if __name__ == "__main__":
    main()
