"""Every example runs: each folder's run files for a few steps on the tiny base, by the command that trains them, and the notebook cell by cell."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tool_builders import SERVER_FILE

from noria.config import RunConfig, load_toml
from noria.service.archive import open_archive

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
RUN_FILES = sorted(path for path in EXAMPLES.glob("*/*.toml") if path.stem != "server")
STEPS = 2

SERVER = (
    SERVER_FILE.replace("max_context = 128", "max_context = 1024")
    .replace("= 256\n", "= 1024\n")
    .replace("rank_classes = [8]\n", "rank_classes = [16]\n")
)


def noria(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "noria.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


def small(path, folder):
    """The example's folder, copied, with its run file on the tiny base, where every group trains: a random model has no reward to tell its episodes
    apart, nor an end; and a server that is quick to compile."""
    copy = folder / path.parent.name
    shutil.copytree(path.parent, copy, ignore=shutil.ignore_patterns("__pycache__", ".noria"))
    text = re.sub(r"^base = .*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = re.sub(r"^(zero_signal|truncated) = .*\n", "", text, flags=re.MULTILINE)
    text = text.replace("[algorithm]\n", '[algorithm]\nzero_signal = "train"\ntruncated = "keep"\n')
    text = re.sub(r"^num_tasks = \d+", "num_tasks = 4", text, flags=re.MULTILINE)
    text = re.sub(r"^(\[supervised\]\n(?:[^\[]*\n)?steps = )\d+", rf"\g<1>{STEPS}", text, flags=re.MULTILINE)
    (copy / path.name).write_text('base = "tiny"\n' + text, encoding="utf-8")
    (copy / "server.toml").write_text(SERVER, encoding="utf-8")
    return copy / path.name


def test_there_are_examples_and_each_is_listed():
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.toml"))}
    assert "first_environment" in folders
    listed = set(re.findall(r"\((\w+)/\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert folders <= listed
    assert all((folder / "README.md").is_file() for folder in map(EXAMPLES.joinpath, folders))


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_run_file_is_one(path):
    load_toml(path, RunConfig)


def test_the_first_environment_is_thirty_lines():
    lines = (EXAMPLES / "first_environment" / "smallest.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_example_trains(path, tmp_path):
    run_file = small(path, tmp_path)
    config = load_toml(run_file, RunConfig)
    state_dir = tmp_path / "state"
    command = ["train", run_file, "--server-config", run_file.parent / "server.toml", "--state-dir", state_dir, "--steps", STEPS, "--json"]
    trained = noria(*command)
    assert trained.returncode == 0, trained.stderr
    (run,) = json.loads(trained.stdout.splitlines()[-1])["runs"]
    with open_archive(state_dir) as archive:
        made = [archive.version(config.name, str(version)).metrics for version in range(1, run["version"] + 1)]
    supervised, reinforced = made[: config.num_supervised_steps], made[config.num_supervised_steps :]
    assert len(supervised) == config.num_supervised_steps
    assert len(reinforced) == STEPS
    assert all("nll_mean" in metrics for metrics in supervised)
    assert all("reward_mean" in metrics and metrics["num_entries"] > 0 for metrics in reinforced)
    assert run["tokens_sampled"] > 0
    assert (state_dir / "report.html").is_file()


@pytest.mark.slow
def test_the_first_example_is_looked_at_before_it_trains(tmp_path):
    run_file = small(EXAMPLES / "first_environment" / "smallest.toml", tmp_path)
    checked = noria("check", run_file, "--server-config", run_file.parent / "server.toml", "--json")
    assert checked.returncode == 0, checked.stderr
    assert "smallest of" in json.loads(checked.stdout)["prompt"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook machinery, which is not ours
def test_the_notebook_runs_and_shows_a_picture(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"]
    (exported,) = tmp_path.glob("noria-*/export/adapter_config.json")
    with open_archive(exported.parents[1]) as archive:
        (name,) = archive.names()
        made = [archive.version(name, str(version)).metrics for version in range(1, archive.run(name).config.algorithm.steps + 1)]
    assert made
    assert all("reward_mean" in metrics and metrics["num_entries"] > 0 for metrics in made)


def test_the_notebook_trains_in_ten_lines_and_is_stored_without_outputs():
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    (call,) = ["".join(cell["source"]) for cell in cells if "noria.train(\n" in "".join(cell["source"])]
    assert call.partition("\n)")[0].count("\n") <= 10
    assert not any(cell.get("outputs") for cell in cells)
