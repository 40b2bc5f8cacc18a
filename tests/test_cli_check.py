"""`noria check`: one group end to end without touching any state, and every mistake that a run file can have found with a clear message."""

import json

import pytest
from tool_builders import RUN_FILE, write_run
from typer.testing import CliRunner

from noria import cli
from noria.actors.load import load_environment
from noria.buffer.cursor import task_at
from noria.config import LearnerConfig, RunConfig, SamplerConfig, ServerConfig, load_toml
from noria.model.config import ModelConfig
from noria.model.weights import load_base
from noria.service.trial import memory_bytes


def check(path, *arguments):
    command = ["check", str(path), "--server-config", str(path.parent / "server.toml"), *arguments]
    return CliRunner().invoke(cli.app, command, env={"COLUMNS": "160", "TERM": "dumb"})


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Of a run whose first group has episodes of different rewards, under its seed."""
    folder = tmp_path_factory.mktemp("check")
    result = check(write_run(folder, "seed = 2\n" + RUN_FILE), "--json")
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def test_nothing_is_left_behind(checked):
    folder, _ = checked
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["env.py", "run.toml", "server.toml"]


def test_the_prompt_its_ids_and_an_episode_are_shown(checked):
    _, data = checked
    tokenizer = load_base("tiny").tokenizer
    assert tokenizer.decode(data["prompt_ids"]) == data["prompt"]
    episode = data["episode"]
    assert episode["ids"][: len(data["prompt_ids"])] == data["prompt_ids"]
    assert episode["sampled"][: len(data["prompt_ids"])] == [0] * len(data["prompt_ids"])
    shown = data["episodes"][episode["member"]]
    assert sum(episode["sampled"]) == shown["num_sampled"]
    assert episode["trained"] == episode["sampled"]
    assert shown["advantage"]
    assert not any(e["advantage"] for e in data["episodes"][: episode["member"]]), "the first that trains is shown"


def test_the_group_is_the_runs_own_first(checked):
    folder, data = checked
    config = load_toml(folder / "run.toml", RunConfig)
    environment = load_environment(config.environment, builtin={}, folder=folder)
    task = task_at(0, num_tasks=environment.num_tasks, seed=config.seed)
    assert data["task"] == {"index": task.index, "seed": task.seed}
    assert task.index, "or the test could not tell it from task 0"
    assert data["prompt"] == environment().reset(task)


def test_rewards_advantages_and_sharing_are_those_of_the_group(checked):
    _, data = checked
    rewards, advantages = ([episode[key] for episode in data["episodes"]] for key in ("reward", "advantage"))
    assert len(rewards) == 4
    assert sum(advantages) == pytest.approx(0, abs=1e-5)
    order = sorted(range(4), key=lambda i: rewards[i])
    assert [advantages[i] for i in order] == sorted(advantages)
    assert data["num_entries"] == sum(e["num_sampled"] for e in data["episodes"] if e["advantage"])
    assert data["num_positions"] <= data["num_positions_unshared"]


def test_the_estimate_is_made_of_what_was_measured(checked):
    _, data = checked
    timing, estimate = data["timing_s"], data["estimate"]
    assert all(seconds >= 0 for seconds in timing.values())
    assert timing["sample"] + timing["wait"] == pytest.approx(timing["play"], rel=1e-6)
    assert timing["play"] <= estimate["step_s"] <= timing["play"] + timing["learn"] + timing["publish"] + 1e-9
    assert estimate["total_s"] == pytest.approx(3 * estimate["step_s"] + estimate["evaluation_s"], rel=1e-6)
    assert "takes most of a step" in estimate["bound"]
    assert data["peak_rss_bytes"] > sum(data["memory_bytes"].values())


def test_the_text_form_marks_what_is_trained(tmp_path):
    result = check(write_run(tmp_path))
    assert result.exit_code == 0, result.output
    for words in ("Prompt of task", "⟦", "⟧", "advantage", "trained tokens on", "K/V pool", "a step", "the whole run"):
        assert words in result.output


def test_memory_is_what_the_arrays_take():
    model: ModelConfig = load_base("tiny").config
    server = ServerConfig(
        base="tiny", dtype="float32", sampler=SamplerConfig(num_pages=100, num_slots=3), learner=LearnerConfig(rank_classes=(4,), num_slots=2)
    )
    found = memory_bytes(model, server)
    assert found["base, float32"] == 4 * model.num_parameters
    assert found["K/V pool"] == 100 * 16 * 2 * 2 * 2 * 16 * 4  # pages, positions, K and V, layers, heads, head size, float32
    per_adapter = 4 * 2 * 4 * sum(i + o for i, o in ((64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)))
    assert found["adapter slots, sampler"] == 3 * per_adapter
    assert found["adapter slots, learner"] == 2 * 4 * per_adapter


def test_a_group_without_signal_and_cut_episodes_are_told(tmp_path):
    result = check(write_run(tmp_path, RUN_FILE.replace("env.py:Low", "env.py:Equal")), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    notes = " ".join(data["notes"])
    assert (data["num_entries"], sum(data["episode"]["trained"]), sum(data["episode"]["sampled"])) == (0, 0, 4)
    assert "all 4 episodes have the reward 0.5" in notes
    assert "train as they are" in notes
    assert "cut by sampling.max_tokens = 4" in notes


def test_a_group_that_penalties_made_equal_is_told_as_that(tmp_path):
    result = check(write_run(tmp_path, "seed = 2\n" + RUN_FILE.replace('truncated = "keep"', 'truncated = "penalize"')), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert len({episode["reward"] for episode in data["episodes"]}) > 1
    assert all(episode["truncated"] for episode in data["episodes"])
    notes = " ".join(data["notes"])
    assert 'all 4 episodes count as reward 0, 4 of them since they were cut (algorithm.truncated = "penalize")' in notes
    assert "have the reward" not in notes


@pytest.mark.parametrize(("zero_signal", "marks"), [("skip", "⟨⟩"), ("train", "⟦⟧")])
def test_what_does_not_train_is_marked_otherwise(tmp_path, zero_signal, marks):
    """Four rewards of 0.5: under "skip" nothing of the group is an entry."""
    text = RUN_FILE.replace("env.py:Low", "env.py:Equal").replace("steps = 3", f'steps = 3\nzero_signal = "{zero_signal}"')
    result = check(write_run(tmp_path, text))
    assert result.exit_code == 0, result.output
    _, _, shown = result.output.partition("The episode of member 0;")
    shown = shown.partition("only sampled")[2].partition("Its group")[0]
    assert {mark for mark in "⟨⟩⟦⟧" if mark in shown} == set(marks)
    assert ("16 trained tokens" if zero_signal == "train" else "0 trained tokens") in result.output


def test_an_evaluation_larger_than_the_environment_is_told(tmp_path):
    result = check(write_run(tmp_path, RUN_FILE.replace("num_tasks = 4", "num_tasks = 5000")), "--json")
    assert "has 1024 held-out tasks" in " ".join(json.loads(result.stdout)["notes"])


def test_the_first_example_of_a_supervised_phase_is_shown(tmp_path):
    path = write_run(tmp_path, RUN_FILE + '[supervised]\nfile = "words.jsonl"\nsteps = 2\n')
    (tmp_path / "words.jsonl").write_text('{"prompt": "say one:", "completion": " one"}\n' * 3, encoding="utf-8")
    result = check(path, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["num_examples"] == 3
    assert data["example"]["text"].startswith("say one: one")
    assert sum(data["example"]["trained"]) == len(" one") + 1
    assert data["estimate"]["supervised_s"] > 0


MISTAKES = {
    "an unknown key": (RUN_FILE.replace("rank = 4", "rnk = 4"), "config_invalid", "did you mean 'rank'"),
    "another base than the server's": (RUN_FILE.replace('"tiny"', '"smollm2-135m"'), "config_invalid", "the server holds 'tiny'"),
    "a rank above the class": (RUN_FILE.replace("rank = 4", "rank = 64"), "config_invalid", "learner.rank_classes"),
    "no room for a prompt": (RUN_FILE.replace("max_tokens = 4", "max_tokens = 500"), "config_invalid", "max_context"),
    "an empty stop text": (RUN_FILE.replace("max_tokens = 4", 'max_tokens = 4\nstop = ["", "a"]'), "config_invalid", "sampling.stop.0"),
    "a temperature below all sense": (RUN_FILE.replace("max_tokens = 4", "max_tokens = 4\ntemperature = 1e-38"), "config_invalid", "0.000001"),
    "a stop text that is no list": (RUN_FILE.replace("max_tokens = 4", 'max_tokens = 4\nstop = "a"'), "config_invalid", "sampling.stop"),
    "no such environment file": (RUN_FILE.replace("env.py", "nowhere.py"), "environment_failed", "no file"),
    "no such class": (RUN_FILE.replace(":Low", ":Lwo"), "environment_failed", "did you mean 'Low'"),
    "a setting that is none": (RUN_FILE + "[environment.settings]\ndigits = 3\n", "config_invalid", "has no setting 'digits'"),
    "an environment that raises": (RUN_FILE.replace(":Low", ":Broken"), "run_failed", "out of order"),
    "a prompt that is too long": (RUN_FILE.replace(":Low", ":Long"), "run_failed", "prompt_too_long"),
    "no such examples": (RUN_FILE + '[supervised]\nfile = "nowhere.jsonl"\nsteps = 1\n', "dataset_invalid", "nowhere.jsonl"),
    "no such warm start": (RUN_FILE.replace("rank = 4", 'rank = 4\nwarm_start = "nowhere"'), "adapter_file_corrupt", "nowhere"),
    "a weighted part that is never reported": (RUN_FILE + "[environment.rewards]\ncorrect = 1.0\n", "run_failed", "correct"),
    "deterministic and stale": ("deterministic = true\n" + RUN_FILE, "config_invalid", "max_staleness"),
    "samples that would all be the same": (RUN_FILE + "samples = 4\n", "config_invalid", "temperature"),
}


@pytest.mark.parametrize(("text", "code", "words"), MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_is_one_line_that_says_what_to_do(tmp_path, text, code, words):
    result = check(write_run(tmp_path, text))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error[{code}]: "), result.stderr
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
