"""Commands that look before, beside or after training: `check`, `doctor`, `debug step`, `bench`, `version`."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noria.cli.frame import DEFAULT_STATE_DIR, FAILED, Json, RunName, ServerFile, StateDir, logging_to, refusals, show
from noria.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


class Bench(StrEnum):
    """What `noria bench` can measure."""

    STEP = "step"
    REPLAY = "replay"
    PACKING = "packing"
    ADAPTERS = "adapters"
    SAMPLER = "sampler"
    CONVERGENCE = "convergence"


class Peer(StrEnum):
    """What a bench can be compared with."""

    PEFT = "peft"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"


PEERS = {
    Peer.PEFT: (Bench.REPLAY, "peers"),
    Peer.TRANSFORMERS: (Bench.SAMPLER, "sampler_peer"),
    Peer.VLLM: (Bench.SAMPLER, "sampler_vllm"),
}
"""Of each peer: the bench that is measured against it, and the module of noria.bench that does it."""


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
        Bench,
        typer.Argument(
            metavar="WHAT",
            help="`step`: a training step against its matrix products. `replay`: shared prefixes against the same rows unshared "
            "(speed, gradients, memory). `packing`: padding and programs under a stream of batches. `adapters`: 32 runs in one stream against one "
            "after another. `sampler`: decoding of batches, groups and many adapters, latencies, publishes, a learner beside it, long episodes. "
            "`convergence`: learning curves of shared and unshared gradients, and of stale data.",
        ),
    ],
    peer: Annotated[
        Peer | None,
        typer.Option(
            metavar="PEER",
            help="Measure against another system in turn. With `replay`: `peft` (torch and PEFT, in .venv-ref). With `sampler`: `transformers` (in "
            ".venv-ref), `vllm` (in .venv-vllm).",
        ),
    ] = None,
    case: Annotated[
        str | None, typer.Option(metavar="NAME", help="With `sampler`: one case alone, such as `batches`; what is unknown is refused with all names.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, that only show that it runs; the result says so.")] = False,
    as_json: Json = False,
) -> None:
    """Measure noria on this machine; every ratio is taken in one run, and a missed bar is a result like any other. Minutes.

    With --json the last line is one JSON object with all values and, under `bars`, what is asked of them and whether it is met.
    """
    with refusals():
        if peer is not None and name is not PEERS[peer][0]:
            raise ConfigError(f"only `{PEERS[peer][0]}` is measured against {peer}, not `{name}`: leave --peer out")
        if case is not None and name is not Bench.SAMPLER:
            raise ConfigError(f"only `sampler` has cases that can be measured alone, not `{name}`: leave --case out")
        result, table = _measured(name, peer, quick=quick, **({} if case is None else {"case": case}))
        show(result, table, as_json=as_json)


def _measured(name: Bench, peer: Peer | None, *, quick: bool, **options: str) -> tuple[dict[str, Any], "RenderableType"]:
    """A bench's JSON object and its table. options: of its `measure`."""
    from importlib import import_module

    if name is Bench.STEP:
        from noria.bench import step

        measured = step.measure("tiny" if quick else "smollm2-135m")
        return measured, step.table(measured)
    module = import_module(f"noria.bench.{name.value if peer is None else PEERS[peer][1]}")
    report = module.measure(quick=quick, **options)
    return report.as_json(), module.table(report)


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
