"""The tree of commands: which function answers to which name, with its examples. Nothing else."""

import typer

from noria.cli import diagnosis, runs, training
from noria.cli.frame import examples


def _group(about: str, *, epilog: str | None = None) -> typer.Typer:
    return typer.Typer(
        help=about,
        epilog=epilog,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _group(
    "Reinforcement-learning post-training of language models, for many users at once.",
    epilog=examples(
        "noria demo", "noria check my_run.toml", "noria train my_run.toml", "noria runs list --state-dir .noria/demo", "noria demo --help"
    ),
)
runs_app = _group("Look at the runs of a state folder, compare them, and take their adapters and episodes out.")
debug_app = _group("Look closely at what a run did.")

app.command("demo", epilog=examples("noria demo", "noria demo --steps 5", "noria demo --resume", "noria demo --json | tail -n 1 | jq .runs"))(
    training.demo
)
app.command("train", epilog=examples("noria train my_run.toml", "noria train a.toml b.toml --state-dir runs", "noria train my_run.toml --resume"))(
    training.train
)
app.command("check", epilog=examples("noria check my_run.toml", "noria check my_run.toml --json | jq .estimate"))(diagnosis.check)
app.command("doctor", epilog=examples("noria doctor", "noria doctor --state-dir runs --json"))(diagnosis.doctor)
app.command("bench", epilog=examples("noria bench step --json", "noria bench replay --peer peft", "noria bench sampler --case batches"))(
    diagnosis.bench
)
app.command("version", epilog=examples("noria version"))(diagnosis.version)

app.add_typer(runs_app, name="runs")
runs_app.command("list", epilog=examples("noria runs list --state-dir .noria/demo"))(runs.list_runs)
runs_app.command("show", epilog=examples("noria runs show largest --state-dir .noria/demo --json"))(runs.show_run)
runs_app.command("compare", epilog=examples("noria runs compare low_rate high_rate", "noria runs compare a b c --plot curves.png"))(runs.compare)
runs_app.command(
    "export", epilog=examples("noria runs export largest --out adapter", "noria runs export largest --kind merged --version best --out model")
)(runs.export)
runs_app.command(
    "episodes", epilog=examples("noria runs episodes largest --out episodes.jsonl", "noria runs episodes largest --version 3 --out 3.parquet")
)(runs.episodes)

app.add_typer(debug_app, name="debug")


@debug_app.callback()
def _debug() -> None:
    """Keeps `step` a command of its own, however few there are."""


debug_app.command("step", epilog=examples("noria debug step largest --version 3", "noria debug step largest --version 3 --json | jq .entries"))(
    diagnosis.debug_step
)


def main() -> None:
    """Entry point of the `noria` command."""
    app()
