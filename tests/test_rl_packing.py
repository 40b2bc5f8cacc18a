"""Packing: cutting keeps every entry and its context, and packing keeps the mask rule, the pairs and every run's order."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batches import algorithm, batches, episode, forked_batch, group, trained_rows, turn

from noria.bench.bases import base_of
from noria.bench.learners import passes
from noria.errors import ConfigError, TreeTooLargeError
from noria.learner.batches import BatchPlanner, Costs, PlannedBatch
from noria.rl.packing import (
    ENTRY_CHUNK,
    NUM_SHAPES,
    MicrobatchPlan,
    MicrobatchShape,
    ReadyRun,
    cut,
    microbatch_shape,
    pack,
    plan_microbatch,
    shapes_up_to,
)
from noria.rl.tree import build_tree
from noria.types import ENTRY_TILE, TILE, Entries, EpisodeGroup, Microbatch, Piece, TokenTree

KEEP_ALL = algorithm(zero_signal="train", truncated="keep")
SHAPES = shapes_up_to(1024, is_counted=False)
COUNTED = shapes_up_to(1024)


def tiny(num_positions: int, num_entries: int) -> MicrobatchShape:
    """A shape for `cut` alone, which knows nothing of tiles."""
    return MicrobatchShape(num_positions, num_entries, 1)


def longest_path(tree: TokenTree) -> int:
    return int(tree.depth_T.max(initial=-1)) + 1


def most_entries(tree: TokenTree) -> int:
    return max(Counter(tree.entries.sequence_M.tolist()).values(), default=1)


def forked_pieces(num_groups: int, seed: int, shape: MicrobatchShape = SHAPES[-1], **lengths: int) -> tuple[Piece, ...]:
    return cut(build_tree(forked_batch(num_groups, seed=seed, **lengths), algorithm())[0], shape)


def schedule(runs: list[ReadyRun], max_positions: int) -> list[MicrobatchPlan]:
    """All passes until nothing is left, serving the runs in turn."""
    plans = []
    waiting = list(runs)
    while waiting:
        plan = plan_microbatch(waiting, SHAPES, max_positions)
        plans.append(plan)
        done = Counter(p.run_id for p in plan.pieces)
        waiting = [dataclasses.replace(r, next_piece=r.next_piece + done[r.run_id]) for r in [*waiting[1:], waiting[0]]]
        waiting = [r for r in waiting if r.next_piece < len(r.pieces)]
    return plans


# Shapes


def test_the_set_of_shapes_is_closed_and_small():
    for shape in (*SHAPES, *COUNTED):
        assert shape.num_positions % TILE == shape.num_entries % ENTRY_CHUNK == 0
        assert shape.num_entries == 2 * shape.num_positions
        assert shape.num_pairs == sum(range(shape.num_tiles + 1))
    assert [s.num_positions for s in SHAPES] == [256, 512, 1024]
    assert [s.num_positions for s in shapes_up_to(640, is_counted=False)] == [192, 320, 640]
    assert [s.num_positions for s in shapes_up_to(128, is_counted=False)] == [128]
    assert [s.num_positions for s in COUNTED] == [1024]
    # score, loss, pull of each; optimizer, read, load; score, pull, extend, clear of a walk
    assert 3 * NUM_SHAPES + 3 + 4 <= 16


@pytest.mark.parametrize("num_positions", [0, -64, 63, 64, 100])
def test_an_axis_that_is_not_made_of_tiles_is_refused(num_positions):
    with pytest.raises(ConfigError, match=str(num_positions)):
        shapes_up_to(num_positions)


# Cutting


@settings(max_examples=300)
@given(batches(), st.integers(0, 12), st.integers(0, 12))
def test_cutting_keeps_each_entry_once_with_its_context(groups, spare_positions, spare_entries):
    tree, _ = build_tree(groups, KEEP_ALL)
    shape = tiny(longest_path(tree) + spare_positions, most_entries(tree) + spare_entries)
    pieces = cut(tree, shape)
    expected = trained_rows(tree.ids_T, tree.end_T, tree.entries)
    for piece in pieces:
        assert 0 < len(piece.ids_T) <= shape.num_positions
        assert 0 < len(piece.entries) <= shape.num_entries
        rows = trained_rows(piece.ids_T, piece.end_T, piece.entries)
        chosen = set(piece.entries.sequence_M.tolist())
        assert rows == [r for r in expected if r[0] in chosen]  # whole sequences, in the tree's order
        depths = [sum(j <= i < piece.end_T[j] for j in range(i)) for i in range(len(piece.ids_T))]
        assert depths == piece.depth_T.tolist()
        needed = {j for i in piece.entries.predict_from_M for j in range(i + 1) if i < piece.end_T[j]}
        assert needed == set(range(len(piece.ids_T)))
    assert sorted(r for p in pieces for r in trained_rows(p.ids_T, p.end_T, p.entries)) == sorted(expected)


@given(batches())
def test_a_tree_that_fits_is_one_piece_and_is_kept_as_it_is(groups):
    tree, _ = build_tree(groups, KEEP_ALL)
    pieces = cut(tree, tiny(max(len(tree), 1), max(len(tree.entries), 1)))
    if not len(tree):
        assert pieces == ()
        return
    (piece,) = pieces
    for name in ("ids_T", "depth_T", "end_T"):
        assert getattr(piece, name).tolist() == getattr(tree, name).tolist()
        assert getattr(piece, name).dtype == np.int32
    for field in dataclasses.fields(Entries):
        kept, original = getattr(piece.entries, field.name), getattr(tree.entries, field.name)
        assert kept.tolist() == original.tolist()
        assert kept.dtype == original.dtype


def test_a_subtree_that_fits_is_not_cut_for_the_room_a_neighbour_leaves():
    tree, _ = build_tree(forked_batch(2, 4, header=10, prompt=100, answer=20), KEEP_ALL)
    sizes = [len(p.ids_T) for p in cut(tree, tiny(200, 1000))]
    assert len(sizes) == 2
    assert sum(sizes) == len(tree) + 10  # only the header is repeated


def test_neighbouring_branches_share_a_piece_up_to_the_whole_axis():
    answers = [episode(m, turn((1,) * 100, (2 + m,) * 51), reward=m % 2) for m in range(10)]
    tree, _ = build_tree([group(*answers)], KEEP_ALL)
    assert [len(p.ids_T) for p in cut(tree, tiny(256, 512))] == [250, 250, 250, 150]


def ways_to_cut(tree: TokenTree, shape: MicrobatchShape) -> Iterator[list[int]]:
    """The sizes of the pieces, in positions, of every way to cut the layout between two sequences into pieces that fit; from the mask rule alone."""
    index, entries = np.arange(len(tree)), tree.entries
    last = {int(q): entries.predict_from_M[entries.sequence_M == q].max() for q in np.unique(entries.sequence_M)}
    units = sorted(last, key=lambda q: (last[q], q))
    paths = [set(np.flatnonzero((index <= last[q]) & (last[q] < tree.end_T)).tolist()) for q in units]
    counts = [int((entries.sequence_M == q).sum()) for q in units]
    for is_cut in itertools.product((False, True), repeat=len(units) - 1):
        stops = [*(n + 1 for n, here in enumerate(is_cut) if here), len(units)]
        parts = list(itertools.pairwise([0, *stops]))
        sizes = [len(set().union(*paths[first:stop])) for first, stop in parts]
        fits = all(size <= shape.num_positions for size in sizes)
        if fits and all(stop == first + 1 or sum(counts[first:stop]) <= shape.num_entries for first, stop in parts):
            yield sizes


@pytest.mark.parametrize("seed", range(15))
def test_no_other_way_to_cut_takes_fewer_tiles_or_pieces_or_positions(seed):
    tree = build_tree(forked_batch(4, 3, seed=seed, header=30, prompt=40, answer=60), KEEP_ALL)[0]
    shape = microbatch_shape(256)

    def cost(sizes: list[int]) -> tuple[int, int, int]:
        return sum(-(-size // TILE) for size in sizes), len(sizes), sum(sizes)

    assert cost([len(piece.ids_T) for piece in cut(tree, shape)]) == min(map(cost, ways_to_cut(tree, shape)))


def test_more_entries_than_the_axis_holds_repeat_their_positions():
    twins = [episode(m, turn((1, 2), (3,) * 10), reward=m % 2) for m in range(7)]
    tree, _ = build_tree([group(*twins)], KEEP_ALL)
    pieces = cut(tree, tiny(16, 32))
    assert [len(p.entries) for p in pieces] == [30, 30, 10]
    assert all(p.ids_T.tolist() == tree.ids_T.tolist() for p in pieces)


def test_an_episode_whose_paths_are_together_longer_than_the_axis_trains_path_by_path():
    forks = [turn((k + 2,) * 80, (9, k), keep=20 if k else None) for k in range(4)]
    long = episode(0, turn((1,) * 20, (8,)), *forks, reward=1.0)
    tree, _ = build_tree([group(long, episode(1))], algorithm())
    assert len(tree) > 256
    pieces = cut(tree, microbatch_shape(128))
    assert len(pieces) == 4
    assert sorted(s for p in pieces for s in set(p.entries.sequence_M.tolist())) == [0, 1, 2, 3]
    assert sum(len(p.entries) for p in pieces) == long.num_sampled


def test_a_path_longer_than_the_axis_is_refused_with_both_sizes():
    tree, _ = build_tree([group(episode(0, turn((1,) * 300, (2, 3)), reward=1.0), episode(1, turn((1,), (2,))))], KEEP_ALL)
    assert len(cut(tree, tiny(301, 602))) == 1
    with pytest.raises(TreeTooLargeError, match=r"301 positions.*256"):
        cut(tree, microbatch_shape(256))


# Planning


def test_a_run_keeps_its_order_whoever_is_ready_beside_it():
    runs = [ReadyRun(f"run-{r}", r, forked_pieces(6, seed=r, answer=60)) for r in range(5)]
    assert all(len(r.pieces) > 1 for r in runs)
    for chosen, max_positions in ((runs, 1024), (runs[:1], 1024), (runs[::-1], 512), (runs[2:], 64)):
        plans = schedule(chosen, max_positions)
        for run in chosen:
            assert [p.piece_index for plan in plans for p in plan.pieces if p.run_id == run.run_id] == list(range(len(run.pieces)))
        assert {plan.shape for plan in plans} <= set(SHAPES)


def test_a_small_piece_never_overtakes_a_large_one_of_its_run():
    def piece(num_positions: int) -> Piece:
        turns = (turn((1,) * num_positions, (2,)), turn((1,) * num_positions, (3,)))
        return cut(build_tree([group(*(episode(m, t, reward=m) for m, t in enumerate(turns)))], algorithm())[0], SHAPES[-1])[0]

    mixed, other = ReadyRun("mixed", 0, [piece(600), piece(600), piece(10)]), ReadyRun("other", 1, [piece(20)])
    assert [(p.run_id, p.piece_index) for p in plan_microbatch([mixed, other], SHAPES, 1024).pieces] == [("mixed", 0), ("other", 0)]
    assert [(p.run_id, p.piece_index) for p in plan_microbatch([other, mixed], SHAPES, 1024).pieces] == [("other", 0), ("mixed", 0)]


def test_leftover_room_goes_to_the_next_runs_and_the_shape_is_the_smallest():
    one, two = forked_pieces(1, seed=1), forked_pieces(1, seed=2)
    alone = plan_microbatch([ReadyRun("one", 0, one)], SHAPES, 1024)
    assert alone.shape == next(s for s in SHAPES if s.holds(one[0].num_tiles, len(one[0].entries)))
    assert alone.padding_waste == 1 - len(one[0].ids_T) / alone.shape.num_positions
    both = plan_microbatch([ReadyRun("one", 0, one), ReadyRun("two", 1, two)], COUNTED, 1024)
    assert [p.run_id for p in both.pieces] == ["one", "two"]
    assert both.dispatched_positions == TILE * (one[0].num_tiles + two[0].num_tiles)
    assert both.padding_waste == 1 - (len(one[0].ids_T) + len(two[0].ids_T)) / both.dispatched_positions


def test_of_the_runs_that_wait_those_share_a_pass_that_fill_it():
    """10 + 4 tiles leave two empty, 10 + 6 none; the piece that is left out is the next pass."""

    def piece(num_tiles: int) -> Piece:
        ids = (1,) * (num_tiles * TILE - 8)
        turns = (turn(ids, (2, 3, 4, 5)), turn(ids, (3, 4, 5, 6)))
        return cut(build_tree([group(*(episode(m, t, reward=m) for m, t in enumerate(turns)))], algorithm())[0], SHAPES[-1])[0]

    runs = [ReadyRun(name, 0, [piece(size)]) for name, size in (("a", 10), ("b", 4), ("c", 6))]
    for shapes in (SHAPES, COUNTED):
        assert [[p.run_id for p in plan_microbatch(ready, shapes, 1024).pieces] for ready in (runs, runs[1:2])] == [["a", "c"], ["b"]]


def test_a_pass_keeps_to_its_limit_but_never_starves_a_piece():
    big = forked_pieces(3, seed=1, answer=60)
    small = forked_pieces(1, seed=2)
    plan = plan_microbatch([ReadyRun("big", 0, big), ReadyRun("small", 1, small)], SHAPES, 256)
    assert big[0].num_tiles * TILE > 256
    assert plan.pieces[0].piece is big[0]
    assert plan.shape == next(s for s in SHAPES if s.holds(big[0].num_tiles, len(big[0].entries)))


def test_a_full_entry_axis_ends_a_pass():
    twins = [episode(m, turn((1, 2), (3,) * 200), reward=m % 2) for m in range(9)]
    pieces = cut(build_tree([group(*twins)], KEEP_ALL)[0], SHAPES[1])
    runs = [ReadyRun(name, slot, pieces) for slot, name in enumerate(("one", "two"))]
    for plan in schedule(runs, 1024):
        assert plan.shape.holds(sum(p.piece.num_tiles for p in plan.pieces), sum(len(p.piece.entries) for p in plan.pieces))


def test_a_piece_cut_for_a_larger_shape_is_refused():
    pieces = forked_pieces(3, seed=1, answer=60)
    with pytest.raises(TreeTooLargeError, match="tiles"):
        plan_microbatch([ReadyRun("run", 0, pieces)], SHAPES[:1], 1024)


# Packing


def naive_pairs(end_T: np.ndarray, is_real_T: np.ndarray) -> list[tuple[int, int]]:
    i, j = np.arange(len(end_T))[:, None], np.arange(len(end_T))[None, :]
    sees = (j <= i) & (i < end_T[None, :]) & is_real_T[:, None]
    blocks = sees.reshape(len(end_T) // TILE, TILE, -1, TILE).any(axis=(1, 3))
    return [(int(q), int(k)) for q, k in np.argwhere(blocks)]


def real_positions(plan: MicrobatchPlan) -> np.ndarray:
    is_real_T = np.zeros(plan.shape.num_positions, bool)
    tile = 0
    for p in plan.pieces:
        is_real_T[tile * TILE : tile * TILE + len(p.piece.ids_T)] = True
        tile += p.piece.num_tiles
    return is_real_T


def assert_well_formed(plan: MicrobatchPlan, batch: Microbatch) -> None:
    shape, is_real_T = plan.shape, real_positions(plan)
    assert len(batch.ids_T) == len(batch.depth_T) == len(batch.end_T) == TILE * len(batch.slot_tile_B) == shape.num_positions
    assert len(batch.entries) == len(batch.slot_M) == shape.num_entries
    assert len(batch.pair_query_X) == len(batch.pair_key_X) == shape.num_pairs
    padding = np.flatnonzero(~is_real_T)
    assert (batch.end_T[padding] == padding + 1).all()
    assert not batch.ids_T[padding].any()
    pairs = list(zip(batch.pair_query_X[: batch.num_pairs].tolist(), batch.pair_key_X[: batch.num_pairs].tolist(), strict=True))
    assert pairs == naive_pairs(batch.end_T, is_real_T)
    tail = slice(batch.num_entries, None)
    assert not batch.entries.weight_M[tail].any()
    assert (batch.entries.temperature_M[tail] == 1).all()
    is_padding_M = np.ones(shape.num_entries, bool)
    for p in batch.placed:
        mine = slice(p.first_entry, p.first_entry + p.num_entries)
        is_padding_M[mine] = False
        assert p.first_entry % ENTRY_TILE == 0
        tiles = slice(p.first_entry // ENTRY_TILE, -(-(p.first_entry + p.num_entries) // ENTRY_TILE))
        assert (batch.slot_entry_tile_E[tiles] == p.slot).all()
        inside = slice(tiles.start * ENTRY_TILE, tiles.stop * ENTRY_TILE)
        assert set((batch.entries.predict_from_M[inside] // TILE).tolist()) <= set(range(p.first_tile, p.first_tile + p.num_tiles))
    assert not batch.entries.weight_M[is_padding_M].any()
    assert (batch.entries.sequence_M[is_padding_M] == shape.num_entries - 1).all()
    assert not (batch.entries.sequence_M[~is_padding_M] == shape.num_entries - 1).any()
    assert batch.entries.sequence_M.max() < shape.num_entries


@pytest.mark.parametrize("max_positions", [256, 1024])
def test_packed_arrays_obey_the_mask_rule_and_list_every_pair(max_positions):
    runs = [ReadyRun(f"run-{r}", r + 1, forked_pieces(r + 1, seed=r, answer=60)) for r in range(4)]
    for plan in schedule(runs, max_positions):
        batch = pack(plan)
        assert_well_formed(plan, batch)
        for placed, planned in zip(batch.placed, plan.pieces, strict=True):
            piece, start = planned.piece, placed.first_tile * TILE
            assert (placed.run_id, placed.slot, placed.piece_index) == (planned.run_id, planned.slot, planned.piece_index)
            assert (batch.slot_tile_B[placed.first_tile : placed.first_tile + placed.num_tiles] == placed.slot).all()
            chosen = slice(placed.first_entry, placed.first_entry + placed.num_entries)
            assert (batch.slot_M[chosen] == placed.slot).all()
            here = Entries(**{f.name: getattr(batch.entries, f.name)[chosen] for f in dataclasses.fields(Entries)})
            got = trained_rows(batch.ids_T, batch.end_T, here)
            expected = trained_rows(piece.ids_T, piece.end_T, piece.entries)
            assert [r[1:] for r in got] == [r[1:] for r in expected]
            assert len(set(zip((r[0] for r in got), (r[0] for r in expected), strict=True))) == len({r[0] for r in expected})
            assert (batch.depth_T[start : start + len(piece.ids_T)] == piece.depth_T).all()
        ends = [p.first_entry + p.num_entries for p in batch.placed]
        assert [p.first_entry for p in batch.placed] == [0, *(-(-end // ENTRY_TILE) * ENTRY_TILE for end in ends[:-1])]
        assert batch.num_entries == ends[-1]
        owners = [set(batch.entries.sequence_M[p.first_entry : p.first_entry + p.num_entries].tolist()) for p in batch.placed]
        assert len(set().union(*owners)) == sum(map(len, owners))


@given(batches(max_tokens=60), st.sampled_from(SHAPES))
def test_any_tree_packs_into_well_formed_arrays(groups, shape):
    pieces = cut(build_tree(groups, KEEP_ALL)[0], tiny(256, 512))
    if pieces:
        plan = plan_microbatch([ReadyRun("run", 3, pieces)], SHAPES, shape.num_positions)
        assert_well_formed(plan, pack(plan))


def test_a_runs_tiles_entries_and_pairs_are_the_same_beside_any_neighbours():
    run = ReadyRun("run", 2, forked_pieces(5, seed=0, answer=60))
    neighbours = [ReadyRun(f"other-{r}", r + 3, forked_pieces(r + 1, seed=r + 1)) for r in range(3)]

    def seen(runs: list[ReadyRun], max_positions: int) -> list[tuple[object, ...]]:
        """What the run's pieces look like, relative to where they lie, in order of execution."""
        views = []
        for batch in map(pack, schedule(runs, max_positions)):
            for p in (p for p in batch.placed if p.run_id == "run"):
                start, stop = p.first_tile * TILE, (p.first_tile + p.num_tiles) * TILE
                m = slice(p.first_entry, p.first_entry + p.num_entries)
                query_X, key_X = batch.pair_query_X[: batch.num_pairs], batch.pair_key_X[: batch.num_pairs]
                mine_X = (query_X >= p.first_tile) & (query_X < p.first_tile + p.num_tiles)
                e = batch.entries
                arrays = (batch.ids_T[start:stop], batch.depth_T[start:stop], batch.end_T[start:stop] - start)
                arrays += (query_X[mine_X] - p.first_tile, key_X[mine_X] - p.first_tile, e.predict_from_M[m] - start)
                arrays += (e.target_M[m], e.weight_M[m], e.advantage_M[m], e.sequence_M[m] - e.sequence_M[m].min())
                views.append((p.piece_index, *(a.tolist() for a in arrays)))
        return views

    alone = seen([run], 1024)
    assert len(alone) == len(run.pieces) > 1
    assert seen([*neighbours, run], 1024) == seen([neighbours[0], run, neighbours[1]], 256) == alone


# Waste


def mixed_batch(seed: int) -> list[EpisodeGroup]:
    """Groups of 4 to 8 episodes, prompts of 20 to 400 ids, answers of up to 4 to 200 tokens; kinds as different as runs are."""
    rng = np.random.default_rng(seed)
    prompt, answer = int(rng.integers(20, 401)), int(rng.integers(4, 201))
    header = tuple(rng.integers(1, 1000, prompt // 2 if seed % 2 == 0 else 0).tolist())
    groups = []
    for g in range(int(rng.integers(1, 9))):
        asked = header + tuple(rng.integers(1, 1000, prompt - len(header)).tolist())
        answers = [tuple(rng.integers(1, 1000, rng.integers(max(1, answer // 4), answer + 1)).tolist()) for _ in range(int(rng.integers(4, 9)))]
        groups.append(group(*(episode(m, turn(asked, said), reward=float(m % 2)) for m, said in enumerate(answers)), name=str(g)))
    return groups


@pytest.mark.parametrize("num_batches", [64, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_stream_of_random_batches_of_eight_runs_wastes_at_most_a_twentieth(num_batches):
    """In the learner's own order, by its own planner."""
    planner = BatchPlanner(COUNTED[-1])

    def of_run(slot: int) -> Iterator[PlannedBatch]:
        return (planner.plan(build_tree(mixed_batch(seed), KEEP_ALL)[0]) for seed in range(slot, num_batches, 8))

    plans = list(passes({str(slot): of_run(slot) for slot in range(8)}, COUNTED, Costs(base_of("tiny").config)))
    positions, computed = sum(p.num_positions for p in plans), sum(p.dispatched_positions for p in plans)
    entries, headed = sum(p.num_entries for p in plans), sum(p.dispatched_entries for p in plans)
    assert len(plans) > num_batches / 2
    assert 0 < 1 - positions / computed <= 0.05
    assert 0 < 1 - entries / headed <= 0.05


@pytest.mark.slow
def test_a_batch_of_a_million_positions_is_cut_within_the_axis():
    tree, _ = build_tree(forked_batch(125, 8, header=200, prompt=800, answer=2000), algorithm())
    shape = microbatch_shape(4096)
    pieces = cut(tree, shape)
    assert len(tree) > 1_000_000
    assert sum(len(p.entries) for p in pieces) == len(tree.entries)
    assert all(shape.holds(p.num_tiles, len(p.entries)) for p in pieces)
    repeated = sum(len(p.ids_T) for p in pieces) / len(tree)
    assert repeated < 1.5
    waste = [plan_microbatch([ReadyRun("run", 0, [p])], [shape], 4096).padding_waste for p in pieces]
    assert sum(waste) / len(waste) < 0.3
