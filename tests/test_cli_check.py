"""`noria check`: one group end to end without touching any state, and every mistake that a run file can have found with a clear message."""

import json

import pytest
from tool_builders import RUN_FILE, write_run
from typer.testing import CliRunner

from noria import cli
from noria.config import LearnerConfig, SamplerConfig, ServerConfig
from noria.model.config import ModelConfig
from noria.model.weights import load_base
from noria.service.trial import memory_bytes


def check(path, *arguments):
    command = ["check", str(path), "--server-config", str(path.parent / "server.toml"), *arguments]
    return CliRunner().invoke(cli.app, command, env={"COLUMNS": "160", "TERM": "dumb"})


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    result = check(write_run(folder), "--json")
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
    assert episode["trained"][: len(data["prompt_ids"])] == [0] * len(data["prompt_ids"])
    assert sum(episode["trained"]) == data["episodes"][0]["num_sampled"]


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
    for words in ("Prompt of task 0", "⟦", "⟧", "advantage", "trained tokens on", "K/V pool", "a step", "the whole run"):
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
    notes = " ".join(json.loads(result.stdout)["notes"])
    assert "all 4 episodes have the reward 0.5" in notes
    assert "cut by sampling.max_tokens = 4" in notes


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
    "a stop text of two tokens": (RUN_FILE.replace("max_tokens = 4", 'max_tokens = 4\nstop = ["ab"]'), "config_invalid", "exactly one token"),
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
