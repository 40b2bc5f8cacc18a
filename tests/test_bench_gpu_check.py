"""`scripts/gpu_check.sh` runs to its end on a machine without a GPU, and says that its sizes are tiny; what has no time left is named."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from noria.bench.bases import base_of
from noria.bench.executors import make_subject
from noria.bench.gpu_check import BUDGET_S, MARGIN, Progress, has_room_for_rows, pass_bytes, sizes, table

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_without_a_gpu_every_part_runs_at_tiny_sizes(tmp_path):
    out = tmp_path / "results" / "check.json"
    environment = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([ROOT / "scripts" / "gpu_check.sh", out], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["sizes"] == "quick"
    assert not result["skipped"]
    parts = result["parts"]
    kernels = [name for name in parts if name.startswith("kernel ")]
    assert list(parts)[: 4 + len(kernels)] == ["parity", *kernels, "adapters", "largest exact prefix", "largest stop prefix"]
    assert {parts[name]["kernel"] for name in kernels} == {"loops"}
    assert sum(name.startswith("replay P") for name in parts) == 2
    assert [part["baseline"] for name, part in parts.items() if name.startswith("replay P")] == ["packed rows"] * 2
    assert parts["parity"]["packed"] <= 1e-5
    assert parts["parity"]["replay"] <= 1e-5
    largest = parts["largest exact prefix"]
    assert largest["positions"] > 0
    assert 0.8 * largest["limit_bytes"] < largest["bytes"] <= largest["limit_bytes"]
    page = out.with_suffix(".md").read_text()
    assert all(f"| {name} |" in page for name in parts)


def test_rows_are_packed_wherever_the_memory_has_room_for_a_packed_row_and_the_result_says_so():
    subject, axis = make_subject(base_of("tiny")), 256
    needed = pass_bytes(subject, axis)
    assert pass_bytes(subject, 2 * axis) > needed
    at_least = replace(sizes(), limit_bytes=int(needed / MARGIN) + 1)
    assert has_room_for_rows(at_least, subject, axis)
    assert not has_room_for_rows(replace(at_least, limit_bytes=needed), subject, axis)


def test_a_part_that_would_begin_too_late_is_named_and_not_begun(tmp_path):
    result = {"parts": {}, "skipped": [], "device": "d", "jax": "j", "date": "2026-01-01"}
    progress = Progress(tmp_path / "check.json", result)
    progress.part("in time", lambda: {"value": 1.0})
    progress.started_s -= BUDGET_S + 1
    progress.part("too late", lambda: pytest.fail("it was begun"))
    written = json.loads((tmp_path / "check.json").read_text())
    assert written["parts"]["in time"]["value"] == 1.0
    assert written["skipped"] == ["too late"]
    assert table(written).row_count == 2
