"""The live table keeps its shape at any usual width, and the lines tell each thing once."""

import io
from dataclasses import replace

import pytest
from report_builders import progress, run_config, snapshot, three_runs
from rich.console import Console

from noria.config import SupervisedConfig
from noria.report.live import Lines, LiveTable, Snapshot, render
from noria.service.progress import RunProgress


def draw(shown: Snapshot, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(render(shown, width))
    return console.export_text().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [80, 100, 110, 140, 200])
def test_the_table_is_one_line_per_run_and_fits(width: int) -> None:
    lines = draw(snapshot(), width)
    assert len(lines) == 1 + 3 + 1 + 2
    assert max(map(len, lines)) <= width
    for line, config in zip(lines[1:4], three_runs(), strict=True):
        assert config.tenant in line
        assert config.name in line
        assert " 11/20 " in line
        assert " 1/1 " in line
        assert "0.28 → …" in line
    assert not any("…" in line.replace("→ …", "") for line in lines), "nothing is cut off"


@pytest.mark.parametrize("width", [80, 140])
def test_the_stages_and_rates_are_below(width: int) -> None:
    stages, rates = draw(snapshot(), width)[-2:]
    for text in ("sampler", "62%", "learner", "31%", "actors", "4%"):
        assert text in stages
    for text in ("1,234 tokens/s", "567 tokens/s", "elapsed 1:13"):
        assert text in rates


def test_a_wide_table_names_run_and_task() -> None:
    config = run_config("my-run", environment="env.py:Countdown")
    shown = snapshot(runs=[(config, progress(config))])
    assert "my-run" in draw(shown, 140)[1]
    assert all("Countdown" in draw(shown, width)[1] for width in (80, 140))


@pytest.mark.parametrize("width", [80, 140])
def test_long_names_are_shortened_and_never_wrap(width: int) -> None:
    config = run_config("a" * 64, environment=f"env.py:{'B' * 80}", tenant="t" * 64)
    lines = draw(snapshot(runs=[(config, progress(config))]), width)
    assert len(lines) == 1 + 1 + 1 + 2
    assert max(map(len, lines)) <= width
    assert "20/20" in lines[1]


def test_a_finished_run_shows_both_evaluations_and_a_failed_one_says_why() -> None:
    config = run_config()
    failed = RunProgress(3, "failed", "run_failed: ten groups in a row failed", {0: 0.25}, [0.1] * 3)
    lines = draw(snapshot(runs=[(config, progress(config)), (run_config("other"), failed)]), 140)
    assert "0.28 → 0.84" in lines[1]
    assert lines[-1].startswith("other: run_failed: ten groups")


def test_before_training_the_table_says_what_it_waits_for() -> None:
    lines = draw(snapshot(runs=[(config, RunProgress()) for config in three_runs()], doing="loading smollm2-135m"), 80)
    assert "loading smollm2-135m … 1:13" in lines[-1]
    assert " 0/20" in lines[1]


def test_an_evaluation_that_is_off_is_said_to_be() -> None:
    config = run_config()
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"num_tasks": 0})})
    assert " off " in draw(snapshot(runs=[(config, progress(config, num_steps=2))]), 80)[1]


def test_hours_are_shown_as_hours() -> None:
    assert "elapsed 1:01:01" in draw(snapshot(elapsed_s=3661.9), 80)[-1]


def test_the_live_table_gives_the_cursor_back_and_ignores_what_comes_later() -> None:
    stream = io.StringIO()
    display = LiveTable(Console(file=stream, width=140, force_terminal=True, legacy_windows=False))
    display.show(snapshot())
    display.close()
    shown = stream.getvalue()
    display.show(snapshot(elapsed_s=4000.0))
    display.close()
    assert "first_letter" in shown
    assert shown.rstrip().endswith("\x1b[?25h")
    assert stream.getvalue() == shown


def test_lines_tell_each_step_and_evaluation_once() -> None:
    config = run_config(steps=4)
    stream = io.StringIO()
    lines = Lines(stream)
    lines.show(snapshot(runs=[(config, RunProgress())], doing="loading tiny"))
    for num_steps in (0, 1, 1, 3, 4, 4):
        lines.show(snapshot(runs=[(config, progress(config, num_steps=num_steps))]))
    written = stream.getvalue().splitlines()
    assert [line.split("] ")[1].split("  reward")[0] for line in written] == [
        "loading tiny",
        "largest  held-out accuracy at version 0: 0.281",
        *(f"largest  step {step}/4" for step in (1, 2, 3)),
        "largest  held-out accuracy at version 4: 0.844",
        "largest  step 4/4",
        "largest  finished",
    ]


def test_lines_keep_up_with_a_run_whose_progress_changes_in_place() -> None:
    config, state = run_config(), RunProgress()
    stream = io.StringIO()
    lines = Lines(stream)
    lines.show(snapshot(runs=[(config, state)]))
    state.evaluations[0] = 0.5
    lines.show(snapshot(runs=[(config, state)]))
    lines.show(replace(snapshot(runs=[(config, state)]), elapsed_s=99.0))
    assert stream.getvalue().count("held-out") == 1


def test_a_supervised_phase_counts_its_steps_and_shows_its_loss() -> None:
    base = run_config(steps=2)
    config = base.model_copy(update={"supervised": SupervisedConfig(file="chats.jsonl", steps=2)})
    state = RunProgress(version=3, rewards=[0.25], supervised_losses=[3.5, 2.25], evaluations={0: 0.1, 4: 0.9})
    stream = io.StringIO()
    Lines(stream).show(snapshot(runs=[(config, state)]))
    written = stream.getvalue()
    assert "step 1/4  supervised, 3.50 nats a token" in written
    assert "step 2/4  supervised, 2.25 nats a token" in written
    assert "step 3/4  reward 0.25" in written
    (line,) = [line for line in draw(snapshot(runs=[(config, state)]), 140) if "3/4" in line]
    assert "0.10 → 0.90" in line
