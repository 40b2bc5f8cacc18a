"""`noria runs`: what a state folder knows of its runs, and what leaves it: adapters, merged models, episodes."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from noria.cli.frame import DEFAULT_STATE_DIR, Json, RunName, StateDir, refusals, show


class Dtype(StrEnum):
    """Of the weights of a merged model."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Kind(StrEnum):
    """Formats of an exported version."""

    PEFT = "peft"
    MERGED = "merged"


def list_runs(*, state_dir: StateDir = None, as_json: Json = False) -> None:
    """List the runs of a state folder."""
    with refusals():
        from noria.report import stored

        runs = stored.read_runs(state_dir or DEFAULT_STATE_DIR)
        show([stored.as_json(run, is_full=False) for run in runs], stored.list_table(runs), as_json=as_json)


def show_run(*, name: RunName, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Show one run: its versions, rewards and evaluations. With --json, every version's metrics and the settings too."""
    with refusals():
        from noria.report import stored

        run = stored.find_stored(stored.read_runs(state_dir or DEFAULT_STATE_DIR), name)
        show(stored.as_json(run, is_full=True), stored.show_table(run), as_json=as_json)


def compare(
    *,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Two or more runs.")],
    state_dir: StateDir = None,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw all runs' curves over one another into this file.")] = None,
) -> None:
    """Compare runs: rewards and accuracies side by side, and the settings in which they differ."""
    with refusals():
        from noria.report import comparison, stored

        known = stored.read_runs(state_dir or DEFAULT_STATE_DIR)
        runs = [stored.find_stored(known, name) for name in names]
        compared = comparison.compare(runs)
        if plot is not None:
            from noria.report.curves import draw_comparison
            from noria.report.files import write_aside

            write_aside(plot, draw_comparison(runs))
            typer.echo(f"{plot}", err=True)
        show(compared, comparison.table(compared), as_json=as_json)


def export(
    *,
    name: RunName,
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder to write into.")],
    kind: Annotated[
        Kind, typer.Option(metavar="peft|merged", help="`peft`: an adapter folder; `merged`: a whole model with the adapter in its weights.")
    ] = Kind.PEFT,
    dtype: Annotated[
        Dtype,
        typer.Option(metavar="float32|bfloat16", help="Of a merged model's weights. `bfloat16`: half the size, but rounding may lose small updates."),
    ] = Dtype.FLOAT32,
    version: Annotated[str, typer.Option(metavar="N|best|newest", help="Which committed version; `best`: by held-out accuracy.")] = "newest",
    state_dir: StateDir = None,
) -> None:
    """Export a version of a run as a PEFT adapter folder or a merged Hugging Face folder. Its checksum is verified first."""
    with refusals():
        from noria.service.export import export_version

        exported = export_version(state_dir or DEFAULT_STATE_DIR, name, version=version, kind=kind.value, out=out, dtype=dtype.value)
        typer.echo(f"version {exported} of {name}, as {kind.value}: {out}")


def episodes(
    *,
    name: RunName,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .jsonl file, or a .parquet one (needs the extra `parquet`).")],
    version: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only episodes of groups that the step to this version trained.")] = None,
    state_dir: StateDir = None,
) -> None:
    """Write a run's episodes, one row each: ids, text, trained mask, log-probabilities, rewards, advantages, and what became of them."""
    with refusals():
        from noria.report.episodes import dump

        count = dump(state_dir or DEFAULT_STATE_DIR, name, out, version=version)
        typer.echo(f"{count} episodes: {out}")
