"""What scripts read: exactly these keys, numbers or null, and nothing that JSON cannot say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_builders import progress, run_config, run_report, session

from noria.report.numbers import SPARKS, mean_reward, sparkline, task_name
from noria.report.summary import summarize
from noria.service.progress import RunProgress

KEYS = {"runs", "sampler_busy", "learner_busy", "install_s", "wall_s"}
RUN_KEYS = {
    "name",
    "eval_before",
    "eval_after",
    "reward_first5",
    "reward_last5",
    "version",
    "max_staleness",
    "max_staleness_seen",
    "dropped_stale",
    "tokens_sampled",
    "tokens_trained",
}


def test_the_summary_has_exactly_the_documented_keys() -> None:
    summary = summarize(session(), install_s=12.5, wall_s=130.25)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary.keys() == KEYS
    assert [run["name"] for run in summary["runs"]] == ["largest", "first_letter", "addition"]
    assert all(run.keys() == RUN_KEYS for run in summary["runs"])
    assert (summary["install_s"], summary["wall_s"]) == (12.5, 130.25)
    assert (summary["sampler_busy"], summary["learner_busy"]) == (0.62, 0.31)


def test_a_runs_numbers_are_those_of_its_report() -> None:
    config = run_config(steps=7, max_staleness=2)
    state = RunProgress(
        version=7,
        status="finished",
        evaluations={0: 0.25, 3: 0.4, 7: 0.75},
        rewards=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        tokens_trained=900,
        staleness=1,
        max_staleness_seen=2,
    )
    (run,) = summarize(session([run_report(config, state=state, dropped={"stale": 2, "failed": 5})]), install_s=0.0, wall_s=1.0)["runs"]
    assert (run["eval_before"], run["eval_after"]) == (0.25, 0.75)
    assert run["reward_first5"] == pytest.approx(0.2)
    assert run["reward_last5"] == pytest.approx(0.4)
    assert (run["version"], run["max_staleness"], run["max_staleness_seen"], run["dropped_stale"]) == (7, 2, 2, 2)
    assert (run["tokens_sampled"], run["tokens_trained"]) == (4900, 900)


def test_what_a_run_never_had_is_null() -> None:
    (run,) = summarize(session([run_report(state=RunProgress(), dropped={})]), install_s=0.0, wall_s=1.0)["runs"]
    assert [run[key] for key in ("eval_before", "eval_after", "reward_first5", "reward_last5")] == [None] * 4
    assert (run["version"], run["dropped_stale"]) == (0, 0)


def test_a_run_that_ended_early_has_no_evaluation_after() -> None:
    config = run_config(steps=20)
    (run,) = summarize(session([run_report(config, state=progress(config, num_steps=8))]), install_s=0.0, wall_s=1.0)["runs"]
    assert run["eval_before"] is not None
    assert run["eval_after"] is None


def test_the_mean_of_no_rewards_is_none() -> None:
    assert mean_reward([]) is None
    assert mean_reward([1.0, 0.0]) == 0.5


def test_a_task_is_named_by_its_built_in_or_its_class() -> None:
    assert task_name(run_config("a", environment="largest")) == "largest"
    assert task_name(run_config("a", environment="folder/my_env.py:Countdown")) == "Countdown"


@given(values=st.lists(st.floats(-5, 5), max_size=60), width=st.integers(1, 20))
def test_a_sparkline_is_as_long_as_its_values_allow(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(SPARKS)


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=60), width=st.integers(1, 20))
def test_a_sparkline_of_a_rising_curve_rises(values: list[float], width: int) -> None:
    heights = [SPARKS.index(character) for character in sparkline(sorted(values), width)]
    assert heights == sorted(heights)


def test_a_sparkline_has_one_scale_for_all_runs() -> None:
    assert sparkline([0.0, 0.5, 1.0], 3) == "▁▅█"
    assert sparkline([0.5, 0.5], 2) == "▅▅"
    assert sparkline([-1.0, 1.0], 2) == "▁█"
