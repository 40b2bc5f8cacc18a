"""Hub names through the real huggingface_hub, without network: a hand-made cache in its own layout, and processes that read HF_HOME afresh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from family_models import CASES, write_folder, write_tokenizer

from noria.model.hub import is_hub_name

REVISION = "0123456789abcdef0123456789abcdef01234567"
SHOW = """
import sys
from noria.errors import NoriaError
from noria.model.weights import load_base
try:
    base = load_base(sys.argv[1])
    print("loaded", base.config.family, base.config.name, base.folder, base.chat is not None)
except NoriaError as error:
    print(error.code, error)
"""


def write_cache(home: Path, name: str) -> Path:
    """A model in the layout of HF_HOME: blobs would be links, plain files are read alike."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = write_folder(repository / "snapshots" / REVISION, CASES["qwen2-tied"])
    write_tokenizer(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return snapshot


def load(name: str, home: Path, **environment: str) -> str:
    """What loading says in a fresh process; the hub's address answers nobody."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW, name],
        env=clean | settings | environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_in_the_cache_is_loaded_without_network(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path, "someone/small-qwen")
    assert load("someone/small-qwen", tmp_path) == f"loaded Qwen2ForCausalLM someone/small-qwen {snapshot} True\n"


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_without_network_a_model_that_is_not_cached_says_so_and_what_to_do(environment: dict[str, str], tmp_path: Path) -> None:
    said = load("someone/absent", tmp_path, **environment)
    assert said.startswith("model_file_missing there is no folder 'someone/absent', no complete model of that name in the Hugging Face cache")
    assert "hf download someone/absent" in said


def test_a_model_that_is_cached_in_part_is_not_taken_for_whole(tmp_path: Path) -> None:
    (write_cache(tmp_path, "someone/cut") / "model.safetensors").unlink()
    assert load("someone/cut", tmp_path).startswith("model_file_missing there is no folder 'someone/cut', no complete model")


@pytest.mark.parametrize(
    ("name", "is_name"), [("Qwen/Qwen3-0.6B", True), ("a/b.c_d", True), ("./a", False), ("a/b/c", False), ("a", False), ("/a", False)]
)
def test_a_hub_name_is_org_slash_model(name: str, is_name: bool) -> None:
    assert is_hub_name(name) == is_name
