"""`noria runs` and `noria debug step` on a real state folder: what they say is what was trained, and what is gone is named."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from family_models import CASES, write_folder, write_tokenizer
from tool_builders import train, write_run
from typer.testing import CliRunner

from noria import cli
from noria.adapters.versions import VersionFiles
from noria.errors import ConfigError
from noria.model.export import read_peft
from noria.model.safetensors_file import read_safetensors
from noria.model.weights import load_base
from noria.report.episodes import COLUMNS, dump, read_episodes
from noria.report.files import aside
from noria.rl.tree import build_tree
from noria.service.archive import open_archive

STEPS = 3


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A folder with two runs, whose evaluations and episodes are all kept."""
    folder = tmp_path_factory.mktemp("state")
    train(folder, steps=STEPS, name="slow", evaluation={"num_tasks": 4, "every": 1})
    train(folder, steps=STEPS, name="fast", adapter={"rank": 4, "learning_rate": 3e-2}, algorithm={"group_size": 4, "truncated": "mask"})
    return folder


@pytest.fixture(scope="module")
def folder_state(tmp_path_factory):
    """A folder with a run on a base that has a Hugging Face form."""
    folder = tmp_path_factory.mktemp("folder_state")
    base = write_folder(folder / "base", CASES["llama"])
    write_tokenizer(base)
    train(folder / "state", steps=0, model=str(base), evaluation={"num_tasks": 0})
    return folder / "state"


def call(*arguments, state_dir=None):
    extra = ["--state-dir", str(state_dir)] if state_dir else []
    return CliRunner().invoke(cli.app, [*map(str, arguments), *extra], env={"COLUMNS": "160", "TERM": "dumb"})


def test_a_comparison_shows_what_differs_and_draws_it(state, tmp_path):
    picture = tmp_path / "curves.png"
    result = call("runs", "compare", "slow", "fast", "--json", "--plot", picture, state_dir=state)
    assert result.exit_code == 0, result.output
    compared = json.loads(result.stdout)
    assert [run["name"] for run in compared["runs"]] == ["slow", "fast"]
    assert all(len(run["rewards"]) == STEPS for run in compared["runs"])
    assert compared["settings"]["adapter.learning_rate"] == [0.01, 0.03]
    assert "name" not in compared["settings"]
    assert "adapter.rank" not in compared["settings"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = call("runs", "compare", "slow", "fast", state_dir=state).output
    assert all(word in table for word in ("slow", "fast", "adapter.learning_rate", "0.03", "settings that differ"))


@pytest.mark.parametrize("names", [["slow"], ["slow", "slow"], ["slow", "nobody"]])
def test_a_comparison_needs_two_runs_that_there_are(state, names):
    result = call("runs", "compare", *names, state_dir=state)
    assert result.exit_code == 2
    assert result.stderr.startswith("error[")


def test_lists_and_single_runs_are_shown_as_before(state):
    runs = json.loads(call("runs", "list", "--json", state_dir=state).stdout)
    assert [(run["name"], run["version"], run["steps"]) for run in runs] == [("slow", STEPS, STEPS), ("fast", STEPS, STEPS)]
    assert "finished" in call("runs", "show", "slow", state_dir=state).output


@pytest.mark.parametrize("version", ["newest", "best", "1"])
def test_an_exported_adapter_is_the_committed_one(state, tmp_path, version):
    out = tmp_path / "adapter"
    result = call("runs", "export", "slow", "--version", version, "--out", out, state_dir=state)
    assert result.exit_code == 0, result.output
    with open_archive(state) as archive:
        record = archive.version("slow", version).record
        committed = VersionFiles(state / "adapters").load(record, 4)
    read = read_peft(out, load_base("tiny").config)
    assert f"version {record.version} of slow" in result.output
    assert read.lora.rank == 4
    for side, leaves in read.params.items():
        for module, leaf in leaves.items():
            assert np.array_equal(leaf, committed.params[side][module]), (side, module)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_merged_model_has_the_dtype_that_was_asked_for(folder_state, tmp_path, dtype):
    out = tmp_path / "merged"
    arguments = [] if dtype is None else ["--dtype", dtype]
    result = call("runs", "export", "run", "--kind", "merged", "--out", out, *arguments, state_dir=folder_state)
    assert result.exit_code == 0, result.output
    tensors = read_safetensors(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16" if dtype == "bfloat16" else "F32"}
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["dtype"] == (dtype or "float32")
    assert load_base(str(out)).config.num_layers == 2


def test_the_best_version_is_the_most_accurate_and_then_the_oldest(state):
    with open_archive(state) as archive:
        best = archive.version("slow", "best").record.version
    shown = json.loads(call("runs", "show", "slow", "--json", state_dir=state).stdout)["evaluations"]
    assert shown[str(best)] == max(shown.values())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version", "9"], "version_unknown", "its newest is 3"),
        (["--version", "latest"], "config_invalid", 'a number, "best" or "newest"'),
        (["--dtype", "bfloat16"], "config_invalid", "always written in float32"),
        (["--kind", "merged"], "adapter_format", ""),  # the byte tokenizer has no Hugging Face form
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(state, tmp_path, arguments, code, words):
    result = call("runs", "export", "slow", "--out", tmp_path / "out", *arguments, state_dir=state)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error[{code}]: ")
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_is_not_kept_is_refused_with_the_setting_that_keeps_it(state, tmp_path):
    copy = Path(shutil.copytree(state, tmp_path / "copy"))
    shutil.rmtree(copy / "adapters" / "slow" / "1")
    result = call("runs", "export", "slow", "--version", "1", "--out", tmp_path / "out", state_dir=copy)
    assert (result.exit_code, result.stderr[:24]) == (2, "error[version_unknown]: ")
    assert "keep_versions" in result.stderr


def test_a_damaged_adapter_is_not_exported(state, tmp_path):
    copy = Path(shutil.copytree(state, tmp_path / "copy"))
    path = copy / "adapters" / "slow" / "3" / "adapter.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = call("runs", "export", "slow", "--out", tmp_path / "out", state_dir=copy)
    assert (result.exit_code, result.stderr[:29]) == (2, "error[adapter_file_corrupt]: ")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_dump_is_every_episode_and_every_column(state, tmp_path, suffix):
    parquet = pytest.importorskip("pyarrow.parquet") if suffix == ".parquet" else None
    out = tmp_path / f"episodes{suffix}"
    result = call("runs", "episodes", "fast", "--out", out, state_dir=state)
    assert result.exit_code == 0, result.output
    rows = read_episodes(state, "fast")
    if parquet is None:
        found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    else:
        found = [row | {"reward_parts": dict(row["reward_parts"])} for row in parquet.read_table(out).to_pylist()]
    assert f"{len(rows)} episodes" in result.output
    assert len(found) == len(rows) > 0
    assert all(list(row) == list(COLUMNS) for row in found)
    for row, want in zip(found, rows, strict=True):
        assert row | {"advantage": 0} == want | {"advantage": 0}
        assert row["advantage"] == pytest.approx(want["advantage"], rel=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_the_trained_mask_is_what_the_learner_trained(state):
    """As many marked tokens as the step had entries, each with the log-probability that the learner was given."""
    for name in ("slow", "fast"):
        with open_archive(state) as archive:
            config = archive.run(name).config
            for version in range(1, STEPS + 1):
                groups = [settled.group for settled in archive.settled(name, trained_version=version)]
                tree, _ = build_tree(groups, config.algorithm)
                rows = read_episodes(state, name, version=version)
                marked = [
                    (row["ids"][i], row["behavior_logprobs"][i], row["advantage"]) for row in rows for i, flag in enumerate(row["trained"]) if flag
                ]
                entries = tree.entries
                want = list(zip(entries.target_M.tolist(), entries.behavior_logprobs_M.tolist(), entries.advantage_M.tolist(), strict=True))
                assert sorted(marked) == sorted(want)
                assert archive.version(name, str(version)).metrics["num_entries"] == len(marked)


def test_what_is_dropped_is_in_the_dump_with_its_reason_and_never_marked(state):
    rows = read_episodes(state, "slow")
    assert all(row["reason"] for row in rows if row["status"] == "dropped")
    assert not any(any(row["trained"]) for row in rows if row["status"] == "dropped")
    assert all(len(row["ids"]) == len(row["sampled"]) == len(row["trained"]) == len(row["behavior_logprobs"]) == len(row["versions"]) for row in rows)


@pytest.mark.parametrize(
    ("name", "words"), [("episodes.csv", ".jsonl or .parquet"), ("nowhere/episodes.jsonl", "error[storage_failed]: cannot write")]
)
def test_a_dump_that_cannot_be_written_is_refused(state, tmp_path, name, words):
    result = call("runs", "episodes", "slow", "--out", tmp_path / name, state_dir=state)
    assert result.exit_code == 2
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_parquet_without_its_package_says_how_to_get_it(state, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'noria\[parquet\]'"):
        dump(state, "slow", tmp_path / "episodes.parquet")


def test_a_file_that_fails_half_way_is_not_there(tmp_path):
    (tmp_path / "file").write_text("old", encoding="utf-8")

    def write_half():
        with aside(tmp_path / "file") as part:
            part.write_text("half", encoding="utf-8")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [("file", "old")]


@pytest.mark.parametrize("version", range(1, STEPS + 1))
@pytest.mark.parametrize("name", ["slow", "fast"])
def test_a_step_taken_again_makes_the_recorded_bytes(state, name, version):
    result = call("debug", "step", name, "--version", version, "--json", state_dir=state)
    assert result.exit_code == 0, result.output
    step = json.loads(result.stdout)
    assert step["is_equal"]
    assert step["checksum"]["now"] == step["checksum"]["recorded"]
    assert step["moments_checksum"]["now"] == step["moments_checksum"]["recorded"]
    assert all(pair["now"] == pair["recorded"] for pair in step["metrics"].values())
    assert len(step["entries"]) == step["metrics"]["num_entries"]["recorded"]
    total = sum(norm**2 for norm in step["grad_norms"].values()) ** 0.5
    assert total == pytest.approx(step["metrics"]["grad_norm"]["recorded"], rel=1e-5)
    assert step["ratio"]["mean"] == pytest.approx(np.mean([entry["ratio"] for entry in step["entries"]]), rel=1e-6)


def test_a_step_of_another_batch_makes_other_bytes_and_exits_with_1(state, tmp_path):
    """The comparison can fail: with another learning rate in the recorded run, the checksums differ."""
    copy = Path(shutil.copytree(state, tmp_path / "copy"))
    with open_archive(copy) as archive, archive._engine.begin() as connection:
        connection.exec_driver_sql("""UPDATE runs SET config = replace(config, '"learning_rate":0.01', '"learning_rate":0.02')""")
    result = call("debug", "step", "slow", "--version", "2", state_dir=copy)
    assert result.exit_code == 1, result.output
    assert "differ" in result.output


@pytest.mark.parametrize("content", [None, "", "{}x", '{"base": "tiny", "unknown": 3}'])
def test_a_step_without_the_servers_settings_asks_for_its_file(state, tmp_path, content):
    copy = Path(shutil.copytree(state, tmp_path / "copy"))
    (copy / "server.json").unlink()
    if content is not None:
        (copy / "server.json").write_text(content, encoding="utf-8")
    result = call("debug", "step", "slow", "--version", "2", state_dir=copy)
    assert (result.exit_code, result.stderr[:23]) == (2, "error[config_invalid]: ")
    assert "--server-config" in result.stderr
    write_run(tmp_path / "files")
    assert call("debug", "step", "slow", "--version", "2", "--server-config", tmp_path / "files" / "server.toml", state_dir=copy).exit_code == 0


def test_a_step_for_people_names_its_parts(state):
    shown = call("debug", "step", "slow", "--version", "2", state_dir=state).output
    assert all(word in shown for word in ("bit for bit", "grad_norm", "gate", "cotangent", "learner / behavior"))


@pytest.mark.parametrize(
    ("version", "words"), [("9", "has no version 9"), ("2", "keep_versions")], ids=["never made", "the version before it is gone"]
)
def test_a_step_that_cannot_be_taken_again_says_why(state, tmp_path, version, words):
    copy = Path(shutil.copytree(state, tmp_path / "copy"))
    shutil.rmtree(copy / "adapters" / "slow" / "1")
    result = call("debug", "step", "slow", "--version", version, state_dir=copy)
    assert (result.exit_code, result.stderr[:24]) == (2, "error[version_unknown]: ")
    assert words in result.stderr


def test_a_step_whose_episodes_were_not_kept_names_the_setting(tmp_path):
    train(tmp_path, steps=1, server={"keep_episodes": False})
    for command in (["debug", "step", "run", "--version", "1"], ["runs", "episodes", "run", "--out", tmp_path / "out.jsonl"]):
        result = call(*command, state_dir=tmp_path)
        assert result.exit_code == 2
        assert "keep_episodes = true" in result.stderr


def test_a_supervised_step_is_taken_again_too(tmp_path):
    lines = [json.dumps({"prompt": f"say {word}:", "completion": f" {word}"}) for word in ("one", "two", "three", "four", "five")]
    write_run(tmp_path / "run")
    (tmp_path / "run" / "words.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    supervised = {"file": str(tmp_path / "run" / "words.jsonl"), "steps": 2, "examples_per_batch": 2}
    train(tmp_path / "state", steps=1, supervised=supervised)
    for version, loss in ((1, "cross_entropy"), (2, "cross_entropy"), (3, "grpo")):
        result = call("debug", "step", "run", "--version", version, "--json", state_dir=tmp_path / "state")
        assert result.exit_code == 0, result.output
        step = json.loads(result.stdout)
        assert (step["is_equal"], step["loss"]) == (True, loss)
    runs = json.loads(call("runs", "list", "--json", state_dir=tmp_path / "state").stdout)
    assert (runs[0]["version"], runs[0]["steps"]) == (3, 3)
    assert "supervised" not in call("runs", "show", "run", state_dir=tmp_path / "state").stderr
