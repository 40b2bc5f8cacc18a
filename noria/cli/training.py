"""`noria demo` and `noria train`: runs to their end, a live table, a report."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noria.cli.frame import FAILED, STOPPED, ServerFile, StateDir, elapsed_s, logging_to, print_error, refusals

if TYPE_CHECKING:
    from noria.report.live import Display
    from noria.report.plan import Plan
    from noria.report.summary import SessionReport

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the runs in the state folder, from their newest committed versions.")]
Summary = Annotated[bool, typer.Option("--json", help="No table: progress goes to stderr, and the last line on stdout is one JSON object.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html and curves.png into the state folder at the end.")]
Steps = Annotated[int | None, typer.Option(min=0, metavar="N", help="Optimizer steps of every run's reinforcement learning, instead of its file's.")]


def demo(
    *,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the demo's state.", show_default=".noria/demo")] = None,
    resume: Resume = False,
    as_json: Summary = False,
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
    with refusals():
        from noria.config import install_seconds
        from noria.report.plan import demo_plan
        from noria.service import folder

        install_s = install_seconds() if install_s is None else install_s
        plan = demo_plan(state_dir=state_dir, resume=resume, steps=steps)
        if not resume:
            folder.clear(plan.state_dir, [run.config.name for run in plan.runs])
        _train(plan, as_json=as_json, report=report, install_s=install_s)


def train(
    *,
    run_files: Annotated[list[Path], typer.Argument(metavar="RUN.toml...", help="Run files; all with the same base.")],
    server_config: ServerFile = None,
    state_dir: StateDir = None,
    resume: Resume = False,
    as_json: Summary = False,
    steps: Steps = None,
    report: Report = True,
) -> None:
    """Train the runs of one or more run files on one resident base, at once.

    Environments named "file.py:Class" are looked for beside their run file.
    """
    with refusals():
        from noria.config import install_seconds
        from noria.report.plan import train_plan

        plan = train_plan(run_files, server_config=server_config, state_dir=state_dir, resume=resume, steps=steps)
        _train(plan, as_json=as_json, report=report, install_s=install_seconds())


def _train(plan: "Plan", *, as_json: bool, report: bool, install_s: float) -> None:
    """Train a plan's runs, show it, report it, and exit with what came of it."""
    import asyncio
    import json

    from noria.report.session import train, until_stopped
    from noria.report.summary import summarize
    from noria.service.folder import LOG

    with logging_to(plan.state_dir / LOG):
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
            print_error(error, about=name)
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
