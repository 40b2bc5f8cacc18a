"""Fixtures that every area shares."""

import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]

settings.register_profile("noria", deadline=None)  # an example that takes long on a busy machine is no failure
settings.load_profile("noria")

jax.config.update("jax_enable_compilation_cache", False)
"""What one test compiles is never read back from disk by another, in this process or in one beside it. Servers that tests start as processes keep
their cache."""


MAPS = Path("/proc/self/maps")
MAX_MAPS = 15_000
"""Memory mappings after which compiled programs are let go between two files. Each program takes a few; Linux allows a process 65,530, and XLA ends
the process with a segmentation fault where it gets no more."""


@pytest.fixture(scope="module", autouse=True)
def _programs_are_let_go() -> Iterator[None]:
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
