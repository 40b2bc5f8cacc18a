"""The walk over a tree in chunks, against the tree itself: every position reached, every entry once, every chunk's sight what the mask rule says."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_builders import ALGORITHM, random_groups

from noria.rl.chunks import plan_replay
from noria.rl.tree import build_tree
from noria.types import TILE


def trees():
    shapes = {
        "num_groups": st.integers(1, 4),
        "group_size": st.integers(2, 5),
        "prompt": st.integers(2, 400),
        "answer": st.integers(1, 90),
        "turns": st.integers(1, 4),
    }
    return st.builds(lambda seed, **kw: build_tree(random_groups(seed, **kw), ALGORITHM)[0], st.integers(0, 10**6), **shapes)


def ancestors(tree, position):
    """The positions on the way from the root to `position`, itself included, by the mask rule alone."""
    index = np.arange(len(tree))
    return index[(index <= position) & (position < tree.end_T)]


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from([128, 192, 256]), st.sampled_from(["exact", "stop"]))
def test_each_entry_is_pulled_once_and_sees_its_whole_path(tree, max_positions, prefix_gradient):
    if not len(tree.entries):
        return
    plan = plan_replay(tree, max_positions, prefix_gradient)
    path = {}  # block -> (ids, depths) of what was entered there
    pulled = set()
    seen_entries = []
    for visit in plan.visits:
        chunk = plan.chunks[visit.chunk]
        piece = chunk.piece
        assert 0 < len(piece.ids_T) <= max_positions
        assert visit.chunk not in pulled
        if visit.action == "enter":
            path = {block: part for block, part in path.items() if block < chunk.first_block} | {chunk.first_block: piece}
            continue
        pulled.add(visit.chunk)
        if visit.action == "drop":
            assert not len(chunk.entry_M)
            continue
        before = [path[block] for block in sorted(path) if block < chunk.first_block]
        blocks = sum(-(-len(p.ids_T) // TILE) for p in before)
        assert blocks == chunk.first_block
        seen_entries += chunk.entry_M.tolist()
        for m, entry in enumerate(chunk.entry_M):
            here = int(piece.entries.predict_from_M[m])
            index = np.arange(len(piece.ids_T))
            sight = (index <= here) & (here < piece.end_T)
            ids = np.concatenate([*(p.ids_T for p in before), piece.ids_T[sight]])
            depths = np.concatenate([*(p.depth_T for p in before), piece.depth_T[sight]])
            truth = ancestors(tree, int(tree.entries.predict_from_M[entry]))
            assert ids.tolist() == tree.ids_T[truth].tolist()
            assert depths.tolist() == list(range(len(truth)))
            assert piece.entries.target_M[m] == tree.entries.target_M[entry]
    assert pulled == set(range(len(plan.chunks)))
    assert sorted(seen_entries) == list(range(len(tree.entries)))
    assert plan.num_blocks == max(c.first_block + c.piece.num_tiles for c in plan.chunks)


@settings(max_examples=30, deadline=None)
@given(trees(), st.sampled_from([128, 256]), st.sampled_from(["exact", "stop"]))
def test_a_chunk_is_pulled_after_all_that_reads_its_keys(tree, max_positions, prefix_gradient):
    if not len(tree.entries):
        return
    plan = plan_replay(tree, max_positions, prefix_gradient)
    entered = []
    for visit in plan.visits:
        if visit.action == "enter":
            assert plan.chunks[visit.chunk].first_block == sum(plan.chunks[c].piece.num_tiles for c in entered)
            entered.append(visit.chunk)
        elif entered and entered[-1] == visit.chunk:
            entered.pop()
        else:
            assert plan.chunks[visit.chunk].first_block == sum(plan.chunks[c].piece.num_tiles for c in entered)
    assert not entered


def test_single_turn_groups_keep_every_episode_in_one_chunk_however_long_the_prompt():
    tree, _ = build_tree(random_groups(3, num_groups=1, group_size=6, prompt=1500, answer=60), ALGORITHM)
    plan = plan_replay(tree, 256)
    assert any(visit.action == "enter" for visit in plan.visits)
    assert sum(len(np.unique(chunk.piece.entries.sequence_M)) for chunk in plan.chunks) == len(np.unique(tree.entries.sequence_M))
    assert plan.num_positions <= len(tree) + len(plan.chunks), "nothing but a head per chunk is repeated"


@settings(max_examples=40, deadline=None)
@given(trees(), st.sampled_from([128, 256]), st.sampled_from(["exact", "stop"]))
def test_the_blocks_of_a_path_that_are_dropped_come_first_and_every_chunk_knows_how_many(tree, max_positions, prefix_gradient):
    if not len(tree.entries):
        return
    plan = plan_replay(tree, max_positions, prefix_gradient)
    dropped = {visit.chunk for visit in plan.visits if visit.action == "drop"}
    path = []
    for visit in plan.visits:
        chunk = plan.chunks[visit.chunk]
        if visit.action == "enter":
            is_constant = [c in dropped for c in path]
            assert is_constant == sorted(is_constant, reverse=True)
            path.append(visit.chunk)
        elif path and path[-1] == visit.chunk:
            path.pop()
        before = path[:-1] if visit.action == "enter" else path
        assert chunk.num_constant == sum(plan.chunks[c].piece.num_tiles for c in before if c in dropped)


@settings(max_examples=40, deadline=None)
@given(trees(), st.sampled_from([128, 256]))
def test_the_constant_prefix_is_what_no_entry_is_predicted_from_or_above_from(tree, max_positions):
    if not len(tree.entries):
        return
    plan = plan_replay(tree, max_positions, "stop")
    predicts = np.zeros(len(tree), bool)
    predicts[tree.entries.predict_from_M] = True
    prefix = {p for p in range(len(tree)) if not predicts[ancestors(tree, p)].any()}
    dropped = [plan.chunks[v.chunk].piece for v in plan.visits if v.action == "drop"]
    assert sum(len(piece.ids_T) for piece in dropped) == len(prefix)
