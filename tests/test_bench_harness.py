"""What all benches rest on: paired ratios, bars that do not raise, FLOPs, rows without sharing, bytes."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.bench.bases import base_of
from noria.bench.executors import best_axis
from noria.bench.flops import training_flops
from noria.bench.harness import Bar, Report, Timings, alternate
from noria.bench.trees import agent, group, sequences, tool_prompt, unshared
from noria.model.lora import module_sizes
from noria.rl.packing import cut, microbatch_shape


def test_works_take_turns_in_both_orders():
    seen = []
    timings = alternate({name: lambda name=name: seen.append(name) for name in "abc"}, repeats=4)
    assert "".join(seen) == "abccbaabccba"
    assert {name: len(values) for name, values in timings.seconds.items()} == {"a": 4, "b": 4, "c": 4}


def test_a_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians():
    timings = Timings({"slow": (10.0, 20.0, 90.0), "fast": (5.0, 2.0, 30.0)})
    assert timings.ratio("slow", "fast") == 3.0
    assert timings.median("slow") / timings.median("fast") == 4.0


@pytest.mark.parametrize(
    ("bar", "is_hit"),
    [
        (Bar("x", 0.9, at_least=0.9), True),
        (Bar("x", 0.89, at_least=0.9), False),
        (Bar("x", 0.0, at_most=0.0), True),
        (Bar("x", 1.0, at_most=0.0), False),
        (Bar("x", None, at_least=8.0), None),
    ],
)
def test_a_bar_is_judged_and_a_missing_value_is_not(bar, is_hit):
    assert bar.is_hit is is_hit
    assert bar.as_json()["is_hit"] is is_hit


def test_a_report_is_json_and_says_its_sizes():
    report = Report("b", "tiny", {"value": 1.5}, (Bar("value", 1.5, at_least=1.0),), is_quick=True)
    result = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert result["value"] == 1.5
    assert result["sizes"] == "quick"
    assert result["bars"] == {"value": {"value": 1.5, "at_least": 1.0, "is_hit": True}}


TREES = {
    "group": group(257, prompt=70, answer=6, members=4),
    "tool prompt": tool_prompt(257, prompt=50, task=9, answer=5, groups=3, members=2),
    "agent": agent(257, prompt=30, observation=7, answer=5, turns=4, branches=8),
}


@pytest.mark.parametrize("name", TREES)
def test_without_sharing_every_sequence_is_laid_out_alone_with_the_same_entries(name):
    tree = TREES[name]
    rows = unshared(tree)
    assert len(rows) > 1.5 * len(tree)
    for sequence in np.unique(tree.entries.sequence_M):
        paths = []
        for layout in (tree, rows):
            mine = np.flatnonzero(layout.entries.sequence_M == sequence)
            predict = layout.entries.predict_from_M[mine]
            index = np.arange(len(layout))
            on_path = (index <= predict.max()) & (predict.max() < layout.end_T)
            paths.append((layout.ids_T[on_path], layout.depth_T[predict], layout.entries.target_M[mine], layout.entries.advantage_M[mine]))
            assert (layout.depth_T[on_path] == np.arange(on_path.sum())).all()
        for a, b in zip(*paths, strict=True):
            np.testing.assert_array_equal(a, b)
    assert (np.diff(rows.end_T) >= 0).all(), "one row after another"
    assert sum(len(piece.entries) for piece in cut(rows, microbatch_shape(256))) == len(tree.entries)


def test_an_agents_turns_have_one_two_four_and_eight_ways():
    tree = TREES["agent"]
    leaves = 8
    assert len(np.unique(tree.entries.sequence_M)) == leaves
    assert len(tree) == 30 + 5 + 2 * (7 + 5) + 4 * (7 + 5) + 8 * (7 + 4)
    assert len(tree.entries) == leaves * 4 * 5, "every path trains all its turns"


def test_flops_of_the_reference_update_are_those_of_the_design():
    config = base_of("smollm2-135m", 30).config
    tree = group(1000, prompt=512, answer=32, members=8)
    assert training_flops(unshared(tree), config, 8) / 1e9 == pytest.approx(2186, rel=0.02)
    assert training_flops(tree, config, 8) / 1e9 == pytest.approx(394, rel=0.07)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(2, 5))
def test_flops_add_up_over_rows_and_count_exactly_the_visible_pairs(prompt, answer, members):
    config = base_of("tiny").config
    tree = group(257, prompt=prompt, answer=answer, members=members)
    rows = unshared(tree)
    index = np.arange(len(tree))
    visible = ((index[:, None] >= index[None, :]) & (index[:, None] < tree.end_T[None, :])).sum()
    sizes = module_sizes(config).values()
    linear = sum(2 * 2 * i * o + 2 * 3 * 8 * (i + o) for i, o in sizes) * config.num_layers * len(tree)
    attention = 2 * 6 * config.num_heads * config.head_dim * config.num_layers * int(visible)
    head = 2 * 2 * config.hidden_size * config.vocab_size * len(tree.entries)
    assert training_flops(tree, config, 8) == pytest.approx(linear + attention + head)
    assert training_flops(rows, config, 8) >= training_flops(tree, config, 8)


def test_the_baselines_axis_is_the_one_that_wastes_least():
    rows = unshared(group(257, prompt=200, answer=9, members=8))
    axis = best_axis(rows, limit=640)
    dispatched = {size: len(cut(rows, microbatch_shape(size))) * size for size in range(256, 641, 64)}
    assert dispatched[axis] == min(dispatched.values())


def test_plain_packed_training_fills_the_axis():
    tree = sequences(257, lengths=[100, 100, 56], entries_each=10)
    assert len(tree) == 256
    assert len(tree.entries) == 30
    assert (tree.entries.advantage_M == 1).all()
