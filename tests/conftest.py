"""Fixtures that every area shares."""

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]

settings.register_profile("noria", deadline=None)  # an example that takes long on a busy machine is no failure
settings.load_profile("noria")


def pytest_configure(config: pytest.Config) -> None:
    """One folder for the programs that this run compiles: each is compiled once, by whichever process of the run, tests or server, comes to it first.

    Nothing of an earlier run is read, and nothing is left. An entry is not written at once, and a killed server leaves half of one: its compression
    shows that, and JAX warns and compiles.
    """
    if not hasattr(config, "workerinput"):
        folder = TemporaryDirectory(prefix="noria-programs-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ |= {"NORIA_CACHE_DIR": folder.name, "JAX_COMPILATION_CACHE_DIR": str(Path(folder.name) / "xla")}
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])


MAPS = Path("/proc/self/maps")
MAX_MAPS = 15_000
"""Memory mappings after which compiled programs are let go between two files. Each program takes a few; Linux allows a process 65,530, and XLA ends
the process with a segmentation fault where it gets no more."""


@pytest.fixture(scope="module", autouse=True)
def _programs_are_kept_and_let_go() -> Iterator[None]:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a server in the test's process sets its own
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that at the end of a run in several processes none waits for another's long file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def reference_python() -> Path:
    """The interpreter with torch, transformers and peft, which the product never imports."""
    python = ROOT / ".venv-ref" / "bin" / "python"
    if not python.exists():
        pytest.fail("the reference environment is missing; run `make .venv-ref`")
    return python


@pytest.fixture(scope="session")
def run_reference(reference_python: Path) -> Callable[[str, Path], None]:
    """Run a script of tests/reference on a folder that holds its inputs and takes its outputs."""

    def run(script: str, folder: Path) -> None:
        command = [reference_python, ROOT / "tests" / "reference" / script, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr

    return run
