"""Against vLLM: what is missing is said by name, the faster dtype is measured, other computations are refused, and every promised key is there."""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noria.bench import sampler_vllm
from noria.bench.bases import base_of
from noria.bench.harness import REPEATS
from noria.bench.sampler_cases import FULL, QUICK
from noria.cli import app
from noria.errors import ConfigError
from noria.model.export import read_peft

ENGINE = """
import json, os, pathlib, sys
_, folder, mode, dtype = sys.argv
pathlib.Path(folder, f"{mode} {dtype}").write_text(str(os.getpid()))
print(json.dumps({"vllm": "0"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids = [[0] * asked["answer"]] * (len(asked["prompts"]) * asked["members"])
    print(json.dumps({"seconds": {"bfloat16": 2.0, "float32": 1.0}[dtype], "ids": ids}), flush=True)
"""
"""Speaks as the peer does; its tokens are always 0. Its number is in the folder, under its mode and dtype."""


@pytest.fixture
def constant_engine(tmp_path, monkeypatch):
    """A peer that samples nothing but 0, twice as fast in float32."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    monkeypatch.setattr(sampler_vllm, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(sampler_vllm, "SCRIPT", script)


def is_under_way(folder, name):
    try:
        os.kill(int((folder / name).read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_without_its_environment_the_bench_says_what_to_make(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler_vllm, "PYTHON", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"make \.venv-vllm"):
        sampler_vllm.measure(quick=True)
    said = CliRunner().invoke(app, ["bench", "sampler", "--peer", "vllm", "--quick"])
    assert said.exit_code != 0
    assert ".venv-vllm" in said.output


def test_an_unknown_case_is_refused_with_all_names():
    with pytest.raises(ConfigError, match="batch32, adapters"):
        sampler_vllm.measure(case="group")


def test_the_faster_dtype_is_measured_and_the_other_engine_ends(tmp_path, constant_engine):
    plain, _ = QUICK.vllm
    with ExitStack() as stack:
        engine = sampler_vllm.fastest(stack, tmp_path, ("compiled", sampler_vllm.DTYPES), plain, base_of("tiny").config)
        assert engine.dtype == "float32"
        assert [is_under_way(tmp_path, f"compiled {dtype}") for dtype in ("float32", "bfloat16")] == [True, False]
        assert engine.trial_s == {"bfloat16": 2.0, "float32": 1.0}
        seconds, ids = engine.take(plain)
        assert seconds == 1.0
        assert ids == [[0] * plain.answer] * plain.num_lanes
        control = sampler_vllm.fastest(stack, tmp_path, ("eager", ("bfloat16",)), plain, base_of("tiny").config)
        assert control.dtype == "bfloat16"
    assert not is_under_way(tmp_path, "compiled float32")


@pytest.mark.slow
def test_an_engine_that_computes_something_else_is_refused(constant_engine):
    with pytest.raises(ConfigError, match="do not compute alike on batch 32"):
        sampler_vllm.measure(quick=True, case="batch32", repeats=1)


@pytest.mark.slow
def test_the_folder_has_the_adapters_that_our_side_publishes(tmp_path):
    loaded = base_of("smollm2-135m", 1)
    sampler_vllm.write_folder(tmp_path, loaded, QUICK)
    _, adapted = QUICK.vllm
    found = [read_peft(tmp_path / "adapters" / str(index), loaded.config) for index in range(4)]
    for peft, ours in zip(found, sampler_vllm.adapters_of(adapted, loaded.config), strict=True):
        assert peft.lora.scale == adapted.spec.scale
        assert all((peft.params[side][module] == leaf).all() for side in ours for module, leaf in ours[side].items())
    assert json.loads((tmp_path / "sizes.json").read_text()) == {"lanes": 32, "context": adapted.prompt + adapted.answer, "rank": 8}


def test_the_bar_is_for_adapters_and_the_gap_is_put_into_words():
    values = {
        "ratio_vllm_batch32": 0.5,
        "ratio_vllm_eager_batch32": 1.25,
        "ratio_vllm_4_adapters_batch32": 1.9,
        "vllm_compiled_over_eager": 2.5,
    }
    (bar,) = sampler_vllm.bars_of(values)
    assert (bar.name, bar.at_least, bar.is_hit) == ("ratio_vllm_4_adapters_batch32", 2.0, False)
    said = sampler_vllm.gap(values)
    assert said is not None
    assert all(number in said for number in ("0.50", "1.25", "2.50"))
    assert sampler_vllm.gap({"ratio_vllm_4_adapters_batch32": 1.9}) is None
    assert sampler_vllm.bars_of({})[0].is_hit is None


@pytest.mark.prove
@pytest.mark.skipif(not sampler_vllm.PYTHON.exists(), reason="`make .venv-vllm` makes the environment of this peer")
def test_against_vllm_every_promised_key_is_there_and_both_sides_compute_alike():
    assert [workload.num_adapters for workload in FULL.vllm] == [0, 4]
    report = sampler_vllm.measure(quick=True, repeats=REPEATS)
    result = report.as_json()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert {"ratio_vllm_batch32", "ratio_vllm_4_adapters_batch32", "cases"} <= set(result)
    assert [row["their_mode"] for row in result["cases"]] == ["compiled", "eager", "adapters"]
    for row in result["cases"]:
        assert row["their_dtype"] in sampler_vllm.DTYPES
        assert min(row["tokens_per_s"], row["their_tokens_per_s"], row["ratio"]) > 0
    assert sampler_vllm.table(report).row_count == 3
