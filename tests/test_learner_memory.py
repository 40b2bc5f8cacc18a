"""What a learner can afford: its sizes follow from the memory that it may use, before any is taken, and decide which executor a tree gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_builders import ALGORITHM, assert_close, drain, make_learner, nonzero_state, random_groups, spec, tiny

from noria.config import LearnerConfig
from noria.errors import ConfigError
from noria.learner.memory import MIB, affordable_positions, packed_bytes, path_bytes, replay_bytes, slot_bytes, walk_blocks
from noria.rl.packing import microbatch_shape
from noria.rl.tree import build_tree

BASE = 4 * tiny()[0].num_parameters
TREE, _ = build_tree(random_groups(1, num_groups=1, group_size=3, prompt=600, answer=20), ALGORITHM)


def settings_of(**changes):
    return LearnerConfig(**{"num_slots": 4, "rank_classes": (8,), "max_positions": 1024, "path_positions": 2048, **changes})


def needed(settings, positions):
    """By the formulas of a pass and of a visit, for one rank class; parameters and gradient are in them, the two moments are not."""
    config, shape = tiny()[0], microbatch_shape(positions)
    slots = slot_bytes(config, settings.num_slots, settings.max_rank)
    packed, num_blocks = packed_bytes(config, shape, base=BASE, slots=slots), walk_blocks(settings.path_positions, shape)
    if not settings.path_positions:
        return packed + 2 * slots
    beside_a_path = packed + 2 * path_bytes(config, num_blocks)  # other runs' passes, between a walk's visits
    return max(beside_a_path, replay_bytes(config, shape, num_blocks, base=BASE, slots=slots)) + 2 * slots


@given(st.integers(10, 400), st.integers(2, 64), st.sampled_from([0, 4096]))
def test_the_longest_microbatch_within_the_memory_is_found(memory_mib, num_tiles, path_positions):
    settings = settings_of(memory_mib=memory_mib, max_positions=64 * num_tiles, path_positions=path_positions)
    affordable = [64 * tiles for tiles in range(2, num_tiles + 1) if needed(settings, 64 * tiles) <= memory_mib * MIB]
    if not affordable or (affordable[-1] < settings.max_positions and not path_positions):
        with pytest.raises(ConfigError):
            affordable_positions(tiny()[0], settings, base=BASE)
    else:
        assert affordable_positions(tiny()[0], settings, base=BASE) == affordable[-1]


def test_every_rank_class_counts():
    one, two = settings_of(rank_classes=(8,)), settings_of(rank_classes=(8, 128))
    room = needed(one, 1024)
    assert affordable_positions(tiny()[0], one, base=BASE, memory=room) == 1024
    with pytest.raises(ConfigError, match=r"set it to \d+, or learner.memory_mib"):
        affordable_positions(tiny()[0], one, base=BASE, memory=room - 1)
    with pytest.raises(ConfigError, match=r"the smallest microbatch, of 128 positions, needs \d+ MiB"):
        affordable_positions(tiny()[0], two, base=BASE, memory=room)


def test_what_could_not_be_trained_any_more_is_refused_with_the_setting_to_change():
    settings = settings_of(path_positions=0)
    with pytest.raises(ConfigError, match=r"set it to \d+, .* learner.path_positions to 1024"):
        affordable_positions(tiny()[0], settings, base=BASE, memory=needed(settings, 1024) - 1)


def test_a_tree_is_packed_where_there_is_room_and_walked_where_there_is_not():
    walking = settings_of(path_positions=1024)
    tight = needed(walking, 256) // MIB + 1
    results = {}
    for name, memory_mib in (("roomy", 0), ("tight", tight)):
        learner = make_learner(max_positions=1024, path_positions=1024, memory_mib=memory_mib)
        run = spec("run")
        learner.load_run(run, nonzero_state(3, run))
        done, pending = learner.forward_backward("run", TREE), None
        drain(learner)
        pending = learner.pending_gradient("run")
        drain(learner)
        results[name] = (done.result(0).metrics, pending.result(0), learner.num_microbatches)
    assert "replay_chunks" not in results["roomy"][0]
    assert results["tight"][0]["replay_chunks"] > 2
    assert_close(results["tight"][1], results["roomy"][1])


def test_a_learner_without_memory_says_so_before_it_takes_any():
    with pytest.raises(ConfigError, match=r"learner\.memory_mib"):
        make_learner(memory_mib=1)
