"""Commands that look before, beside or after training: `check`, `doctor`, `debug step`, `bench`, `version`."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from noria.cli.frame import DEFAULT_STATE_DIR, FAILED, Json, RunName, ServerFile, StateDir, logging_to, refusals, show


class Bench(StrEnum):
    """What `noria bench` can measure."""

    STEP = "step"


def check(
    *,
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    server_config: ServerFile = None,
    as_json: Json = False,
) -> None:
    """Try a run file: one group end to end, in a folder of its own that is removed afterwards.

    Shows the rendered prompt and its ids, one sampled episode with its trained tokens marked, rewards and advantages, what prefix sharing saves,
    memory, and an estimate of the whole run's time with the stage that bounds it. Nothing of the run is stored.
    """
    with refusals():
        from noria.report.check import as_json as plain
        from noria.report.check import check_run, render
        from noria.report.plan import train_plan

        plan = train_plan([run_file], server_config=server_config)
        with logging_to(Path(os.devnull)):
            checked = check_run(plan)
        show(plain(checked), render(checked), as_json=as_json)


def doctor(*, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Look at this machine: versions, devices, memory, disk, clock, packages and models. Exits with 1 if anything is unusable."""
    with refusals():
        from noria.report.doctor import examine, table

        findings = examine(state_dir or DEFAULT_STATE_DIR)
        show([finding.as_json() for finding in findings], table(findings), as_json=as_json)
        if any(finding.status == "fail" for finding in findings):
            raise typer.Exit(FAILED)


def debug_step(
    *,
    name: RunName,
    version: Annotated[int, typer.Option(min=1, metavar="V", help="The version that the step made.")],
    state_dir: StateDir = None,
    server_config: Annotated[
        Path | None, typer.Option(metavar="SERVER.toml", help="Server file.", show_default="the settings of the folder's newest server")
    ] = None,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the run file lies: the examples of a supervised phase are looked for beside it.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """Take one recorded optimizer step again, offline: its entries, ratios and gradients, and whether it makes the recorded bytes.

    Needs the files of version V-1 (server file: keep_versions) and the episodes of its batch (keep_episodes). Exits with 1 if the checksums differ.
    """
    with refusals():
        from noria.report import retaken
        from noria.report.plan import load_server
        from noria.service.recorded_step import retake

        server = load_server(server_config) if server_config else None
        step = retake(state_dir or DEFAULT_STATE_DIR, name, version, server=server, folder=folder)
        show(retaken.as_json(step), retaken.render(step), as_json=as_json)
        if not step.is_equal:
            raise typer.Exit(FAILED)


def bench(
    *,
    name: Annotated[
        Bench, typer.Argument(metavar="WHAT", help="What to measure: `step`, a training and a decode step against their matrix products.")
    ],
    as_json: Json = False,
) -> None:
    """Measure noria on this machine; every ratio is taken in one run. Minutes."""
    with refusals():
        from noria.bench.step import measure, table

        result = {Bench.STEP: measure}[name]()
        show(result, table(result), as_json=as_json)


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
