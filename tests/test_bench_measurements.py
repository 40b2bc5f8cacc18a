"""Each bench measures what it says, at its quick sizes on the tiny base, and prints the keys that are promised."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from noria.bench import adapters, convergence, peers, replay
from noria.bench.bases import base_of
from noria.bench.learners import add_runs, make_learner, passes, train_in_turn
from noria.bench.trees import group, unshared
from noria.cli import app
from noria.config import LearnerConfig
from noria.learner.batches import Costs
from noria.rl.packing import shapes_up_to

CASE_KEYS = {
    *("name", "P", "R", "G", "executor", "mode", "rho", "flop_ratio", "speedup", "fraction_of_flop_ratio"),
    *("grad_rel_l2", "grad_noise", "peak_bytes", "peak_over_formula"),
}


def short_batch(seed, slot):
    return group(257, prompt=(20, 25, 100)[slot], answer=3 + seed, members=3 + slot, seed=seed)


def as_json(report):
    result = report.as_json()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["sizes"] == "quick"
    return result


@pytest.mark.slow
def test_replay_has_every_executor_and_gradients_that_agree():
    report = replay.measure(quick=True, repeats=1)
    result = as_json(report)
    assert {"cases", "peak_growth_g2_g16", "baseline_over_packed_training"} <= set(result)
    for row in result["cases"]:
        assert set(row) == CASE_KEYS
        assert row["fraction_of_flop_ratio"] == pytest.approx(row["speedup"] / row["flop_ratio"])
        if row["mode"] == "exact":
            assert row["grad_rel_l2"] <= 1e-5
            assert 0 < row["grad_noise"] <= 1e-5
        else:
            assert row["grad_rel_l2"] > 0.01, "the prefix matters"
    assert [(row["executor"], row["mode"]) for row in result["cases"]] == [("packed", "exact"), ("replay", "exact"), ("replay", "stop")]
    assert abs(result["peak_growth_g2_g16"]) < 0.01
    assert replay.table(report).row_count == len(result["cases"])


def test_the_cases_of_replay_are_those_that_are_promised():
    """P to 4096, one case of eight times the FLOPs, a tool prompt over 8 groups, an agent's tree of 4 turns x 8 branches; both executors of each."""
    config = base_of("tiny").config
    cases, trees = replay.full_cases(), [case.make(config.vocab_size) for case in replay.full_cases()]
    assert max(case.prompt or 0 for case in cases) == 4096
    assert all(set(replay.BOTH) <= set(case.executors) for case in cases)
    ratios = [len(unshared(tree)) / len(tree) for tree in trees]
    assert max(ratios) >= 8
    (agent,) = (tree for case, tree in zip(cases, trees, strict=True) if "agent" in case.name)
    assert len(np.unique(agent.entries.sequence_M)) == 8
    (tools,) = (tree for case, tree in zip(cases, trees, strict=True) if "tool" in case.name)
    assert len(np.unique(tools.ids_T[tools.depth_T == 512])) == 8, "that is where the groups part"


@pytest.mark.slow
def test_packing_counts_waste_and_compiles_nothing_later_and_the_command_prints_it_on_the_last_line():
    done = CliRunner().invoke(app, ["bench", "packing", "--quick", "--json"])
    assert done.exit_code == 0, "a missed bar is a result"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["sizes"] == "quick"
    assert {"padding_waste", "num_programs", "compilations_after_warmup"} <= set(result)
    assert 0 < result["padding_waste"] < 0.1
    assert result["padding_waste"] == max(result["positions_waste"], result["entries_waste"])
    assert result["num_programs"] > 0
    assert result["compilations_after_warmup"] == 0
    assert {bar["is_hit"] for bar in result["bars"].values()} <= {True, False}


def test_the_passes_that_padding_is_measured_on_are_the_learners():
    """As many microbatches as a learner dispatches that trains the same batches."""
    loaded, runs = base_of("tiny"), dict.fromkeys("abc", 8)
    learner = make_learner(loaded, LearnerConfig(max_positions=256, num_slots=4, rank_classes=(8,), max_quantum_s=1e9))
    add_runs(learner, loaded, runs)

    def of_run(slot):
        return (learner.planner.plan(short_batch(seed, slot)) for seed in range(4))

    def batches():
        return {run_id: of_run(slot) for slot, run_id in enumerate(runs)}

    assert train_in_turn(learner, batches(), lambda _run_id: None) == 12
    plans = list(passes(batches(), shapes_up_to(256), Costs(loaded.config)))
    assert len(plans) == learner.num_microbatches > 4
    assert any(len({piece.run_id for piece in plan.pieces}) > 1 for plan in plans), "some are shared"


@pytest.mark.slow
def test_adapters_compares_both_sizes_and_says_what_a_step_is_made_of():
    result = as_json(adapters.measure(quick=True, repeats=1))
    assert set(result["fused_over_sequential"]) == {"64", "256"}
    assert all(value > 0 for value in result["fused_over_sequential"].values())
    assert 0 < result["overhead_32_slots"] < 1
    assert 0 < result["save_share"] < 1
    assert 0 < result["optimizer_share"] < 1


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
