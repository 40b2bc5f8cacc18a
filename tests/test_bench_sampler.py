"""The sampler's bench: the workloads are those that are promised, values come from what was timed, and every key is there at quick sizes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from noria.bench import sampler, sampler_peer
from noria.bench.bases import base_of
from noria.bench.sampler_cases import FULL, QUICK, Workload, adapters_of
from noria.bench.sampler_own import p95, row, step_seconds
from noria.bench.sampler_side import Decoded, Taken
from noria.cli import app
from noria.errors import ConfigError
from noria.sampler.pages import PAGE
from noria.types import Completion

ROW_KEYS = {
    *("name", "lanes", "prompts", "prompt", "answer", "adapters", "rank", "tokens_per_s", "first_token_p50_ms", "first_token_p95_ms"),
    *("inter_token_p95_ms", "prefix_hits", "finished"),
}
OWN_KEYS = {
    *("fraction_of_matmuls_batch32", "adapters32_over_1", "publish_cost", "inter_token_p95_training_minus_solo_ms", "constrained_over_free"),
    *("constrained_finished", "long_episodes_finished"),
}
PEER_KEYS = {"ratio_batch32", "ratio_group", "ratio_batch32_bf16", "ratio_group_bf16"}


def taken(seconds=2.0, *, first_s=(0.1, 0.3), gaps_s=(0.01, 0.02), decodes=(), lengths=(8, 8), asked=10, found=5):
    completions = tuple(Completion((5,) * length, (-1.0,) * length, (0,) * length, "length") for length in lengths)
    return Taken(seconds, first_s, gaps_s, completions, decodes, asked, found)


def test_the_workloads_are_those_that_are_promised():
    assert [(w.num_lanes, w.prompt, w.answer, w.num_adapters) for w in FULL.batches] == [(n, 64, 64, 0) for n in (1, 8, 32, 64)]
    assert (FULL.group.num_prompts, FULL.group.prompt, FULL.group.members, FULL.group.answer) == (4, 512, 8, 32)
    assert [(w.rank, w.num_adapters) for w in FULL.adapters] == [(rank, number) for rank in (8, 64) for number in (1, 4, 32)]
    assert {w.num_lanes for w in FULL.adapters} == {32}
    assert (FULL.constrained.top_k, FULL.constrained.top_p) == (50, 0.9)
    assert replace(FULL.constrained, name="free", top_k=0, top_p=1.0) == FULL.free
    plain, adapted = FULL.vllm
    assert plain is FULL.batch32
    assert (adapted.num_lanes, adapted.num_adapters, adapted.rank) == (32, 4, 8)
    assert FULL.publishing.answer > 2 * FULL.publish_every == 100
    assert (FULL.long_episodes, FULL.long_context) == (16, 16_384)


def test_every_round_has_prompts_of_its_own_and_a_round_is_the_same_for_everybody():
    config = base_of("tiny").config
    first, again, second = (QUICK.group.prompts(number, config) for number in (1, 1, 2))
    assert first == again
    assert not set(first) & set(second)
    assert len(set(first)) == QUICK.group.num_prompts
    assert all(len(prompt) == QUICK.group.prompt and max(prompt) < config.vocab_size for prompt in first)


def test_the_adapters_differ_and_change_what_is_sampled():
    config = base_of("tiny").config
    one, two = adapters_of(Workload("two", 2, 4, 1, 4, num_adapters=2), config)
    assert all(leaf.any() for side in one.values() for leaf in side.values())
    assert all((one["a"][module] != two["a"][module]).any() for module in one["a"])
    (alone,) = adapters_of(Workload("one", 8, 4, 1, 4, num_adapters=1), config)
    np.testing.assert_array_equal(alone["b"]["q"], one["b"]["q"])


def test_a_step_is_timed_over_the_dispatches_in_which_all_lanes_decode_with_what_lies_between():
    decodes = (Decoded(0.0, 1.0, 16, 4), Decoded(2.0, 3.0, 32, 4), Decoded(3.5, 5.0, 32, 4), Decoded(5.0, 9.0, 8, 1))
    assert step_seconds(taken(decodes=decodes), 32) == (5.0 - 2.0) / 8


def test_a_row_has_medians_over_rounds_and_percentiles_over_all_samples():
    workload = Workload("w", 2, 4, 1, 8)
    takes = [taken(2.0), taken(4.0, first_s=(0.5, 0.7), gaps_s=(0.03,)), taken(8.0, first_s=(0.9, 1.1), gaps_s=(), lengths=(8, 7))]
    found = row(workload, takes)
    assert set(found) == ROW_KEYS
    assert found["tokens_per_s"] == 4.0
    assert found["first_token_p50_ms"] == pytest.approx(600)
    assert found["first_token_p95_ms"] == pytest.approx(1e3 * np.percentile([0.1, 0.3, 0.5, 0.7, 0.9, 1.1], 95))
    assert found["inter_token_p95_ms"] == pytest.approx(1e3 * p95([0.01, 0.02, 0.03]))
    assert (found["prefix_hits"], found["finished"], found["rank"]) == (0.5, 2, None)
    assert p95([]) == 0.0


def test_bars_are_judged_from_the_values_and_what_was_not_measured_is_not_judged():
    good = {
        "fraction_of_matmuls_batch32": 0.7,
        "adapters32_over_1": 0.85,
        "publish_cost": 0.02,
        "inter_token_p95_training_minus_solo_ms": 2000.0,
        "constrained_over_free": 0.6,
        "constrained_finished": 1.0,
        "long_episodes_finished": 1.0,
    }
    assert set(good) == OWN_KEYS
    assert [bar.is_hit for bar in sampler.bars_of(good)] == [True] * len(OWN_KEYS)
    bad = {key: value + (0.01 if key in ("publish_cost", "inter_token_p95_training_minus_solo_ms") else -0.01) for key, value in good.items()}
    assert [bar.is_hit for bar in sampler.bars_of(bad)] == [False] * len(OWN_KEYS)
    assert {bar.is_hit for bar in sampler.bars_of({})} == {None}
    bounds = {"ratio_batch32": 1.0, "ratio_group": 4.0, "ratio_batch32_bf16": 1.3, "ratio_group_bf16": 3.0}
    assert {bar.name: bar.at_least for bar in sampler_peer.bars_of(bounds)} == bounds
    assert all(bar.is_hit for bar in sampler_peer.bars_of(bounds))


@pytest.mark.parametrize("measure", [sampler.measure, sampler_peer.measure])
def test_an_unknown_case_is_refused_with_the_names_of_all(measure):
    with pytest.raises(ConfigError, match=r"no case 'batch'.*batch"):
        measure(quick=True, case="batch")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay", "--peer", "vllm"), "only `sampler`"),
        (("sampler", "--peer", "peft"), "only `replay`"),
        (("packing", "--case", "batches"), "only `sampler`"),
    ],
)
def test_peers_and_cases_belong_to_their_bench(arguments, message):
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_without_its_environment_the_peer_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler_peer, "PYTHON", tmp_path / "python")
    with pytest.raises(ConfigError, match=r"make \.venv-ref"):
        sampler_peer.measure(quick=True)


@pytest.mark.slow
def test_every_own_key_is_there_and_the_quick_sizes_say_so():
    result = sampler.measure(quick=True, repeats=1).as_json()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(result) >= OWN_KEYS
    assert set(result["bars"]) == OWN_KEYS
    assert result["sizes"] == "quick"
    *rows, long = result["cases"]
    assert all(set(row) >= ROW_KEYS for row in rows)
    assert all(row["finished"] == row["lanes"] for row in rows)
    assert (long["finished"], long["episodes"], long["pages"]) == (16, 16, long["pages_needed"] // 4)
    assert long["pages_needed"] == QUICK.long_episodes * QUICK.long_context // PAGE
    found = {row["name"]: row for row in rows}
    assert found["group"]["prefix_hits"] > 0.5, "samples of one prompt share its pages"
    assert found["batch 32"]["prefix_hits"] < 0.1, "no round has the prompts of another"
    assert found["publishing, with"]["publishes"] >= 2
    assert found["beside training: training"]["learner_passes"] > 0
    assert (result["constrained_finished"], result["long_episodes_finished"]) == (1.0, 1.0)
    assert 0 < result["fraction_of_matmuls_batch32"] < 1.5


@pytest.mark.slow
def test_the_peer_computes_the_same_and_every_ratio_is_there():
    result = sampler_peer.measure(quick=True, repeats=1).as_json()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(result) >= PEER_KEYS
    assert all(result[key] > 0 for key in PEER_KEYS)
    rows = {row["name"]: row for row in result["cases"]}
    assert set(rows["group, float32"]["their_trial_s"]) == set(sampler_peer.WAYS)
    assert "shared" not in rows["batch 32, float32"]["their_trial_s"]
    assert {row["dtype"] for row in rows.values()} == {"float32", "bfloat16"}
