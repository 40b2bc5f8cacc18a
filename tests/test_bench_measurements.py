"""Each bench measures what it says, at its quick sizes on the tiny base, and prints the keys that are promised."""

import json

import pytest
from typer.testing import CliRunner

from noria.bench import adapters, convergence, packing, peers, replay
from noria.cli import app

CASE_KEYS = {
    *("name", "P", "R", "G", "executor", "mode", "rho", "flop_ratio", "speedup", "fraction_of_flop_ratio"),
    *("grad_rel_l2", "peak_bytes", "peak_over_formula"),
}


def as_json(report):
    result = report.as_json()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["sizes"] == "quick"
    return result


@pytest.mark.slow
def test_replay_has_every_case_and_gradients_that_agree():
    report = replay.measure(quick=True, repeats=1)
    result = as_json(report)
    assert {"cases", "peak_growth_g2_g16", "baseline_over_packed_training"} <= set(result)
    for row in result["cases"]:
        assert set(row) == CASE_KEYS
        assert row["rho"] > row["flop_ratio"] > 1 or row["G"] is not None
        assert row["fraction_of_flop_ratio"] == pytest.approx(row["speedup"] / row["flop_ratio"])
        if row["mode"] == "exact":
            assert row["grad_rel_l2"] <= 1e-5
        else:
            assert row["grad_rel_l2"] > 0.01, "the prefix matters"
    assert {(row["executor"], row["mode"]) for row in result["cases"]} == {("packed", "exact"), ("replay", "exact"), ("replay", "stop")}
    assert [row["G"] for row in result["cases"]].count(None) == 4, "a tool prompt and an agent, by both executors"
    assert abs(result["peak_growth_g2_g16"]) < 0.01
    assert replay.table(report).row_count == len(result["cases"])


@pytest.mark.slow
def test_packing_counts_waste_and_compiles_nothing_later():
    result = as_json(packing.measure(quick=True))
    assert {"padding_waste", "num_programs", "compilations_after_warmup"} <= set(result)
    assert 0 < result["padding_waste"] < 0.5
    assert result["num_programs"] > 0
    assert result["compilations_after_warmup"] == 0


@pytest.mark.slow
def test_adapters_compares_both_sizes():
    result = as_json(adapters.measure(quick=True, repeats=1))
    assert set(result["fused_over_sequential"]) == {"64", "256"}
    assert all(value > 0 for value in result["fused_over_sequential"].values())
    assert 0 < result["overhead_32_slots"] < 1


@pytest.mark.slow
def test_convergence_pairs_its_arms():
    arms = [arm for arm in convergence.ARMS if arm.name in ("naive", "exact", "stale 2, corrected", "stale 0, corrected")]
    result = as_json(convergence.measure(quick=True, arms=arms))
    assert [(d["arm"], d["minus"]) for d in result["differences"]] == [("exact", "naive"), ("stale 2, corrected", "stale 0, corrected")]
    curves = result["curves"]
    first = {name: [curve[0] for curve in of_seeds] for name, of_seeds in curves.items()}
    assert all(rewards == first["naive"] for rewards in first.values()), "one seed, one beginning"
    stale = [curve[:3] for curve in curves["stale 2, corrected"]]
    assert stale != [curve[:3] for curve in curves["stale 0, corrected"]], "step 3 is sampled by version 0"
    assert len(set(first["naive"])) > 1, "seeds differ"


def test_the_bootstrap_interval_is_that_of_all_resamples():
    assert convergence.bootstrap_interval([0.5] * 4) == (0.5, 0.5)
    low, high = convergence.bootstrap_interval([0.0, 1.0])  # means 0, 0.5, 0.5, 1 of equal weight
    assert (low, high) == (pytest.approx(0.0375), pytest.approx(0.9625))


@pytest.mark.slow
def test_the_peer_trains_the_same_and_answers_in_turn():
    result = as_json(peers.measure(quick=True, repeats=1))
    assert {"ratio_peft_step", "ratio_peft_4_tenants", "ratio_peft_step_f32", "baseline_over_peft"} <= set(result)
    assert all(result[key] > 0 for key in ("ratio_peft_step", "ratio_peft_4_tenants", "ratio_peft_step_f32", "baseline_over_peft"))


def test_a_peer_belongs_to_replay():
    done = CliRunner().invoke(app, ["bench", "packing", "--peer", "peft"])
    assert done.exit_code == 2
    assert "only `replay`" in done.output


@pytest.mark.slow
def test_the_command_prints_one_object_on_the_last_line_and_exits_with_0():
    done = CliRunner().invoke(app, ["bench", "packing", "--quick", "--json"])
    assert done.exit_code == 0
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bars"]["num_programs"]["is_hit"] in (True, False)
