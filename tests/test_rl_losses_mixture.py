"""Runs with different losses in one pass: each has the bits that it has alone, at any place, in any split, and no mixture compiles anything."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from loss_cases import CORRECTED, NUM_SLOTS, PLAIN, SPECS, arrays, batch, run
from losses_reference import Sequence_, Token
from rl_batches import algorithm, forked_batch

from noria.rl.losses import LOSSES, LossTable, TokenOutputs, cotangents, loss_inputs_of, loss_table, run_metrics, scope_of
from noria.rl.packing import MicrobatchPlan, PlannedPiece, cut, microbatch_shape, pack
from noria.rl.tree import build_tree
from noria.types import LossSpec, Microbatch

jitted = jax.jit(cotangents)


def test_all_kinds_in_one_pass_have_the_bits_of_each_alone_at_any_place_and_size():
    specs = dict(enumerate((SPECS | {name: CORRECTED[name] for name in ("grpo+m2", "ppo+icepop", "gspo+sequence")}).values()))
    assert len(specs) < NUM_SLOTS
    mixed = [s for slot, spec in specs.items() for s in batch(np.random.default_rng(slot), {slot: spec}, 3)]
    for s in mixed:
        s.pair += 8 * s.slot  # unique in the pass, as sequences are
    mixed = [mixed[k] for k in np.random.default_rng(0).permutation(len(mixed))]
    together, sums = run(mixed, specs, 1024)
    owner = np.array([s.slot for s in mixed for _ in s.tokens])
    for slot, spec in specs.items():
        mine = [s for s in mixed if s.slot == slot]
        for size, first in ((256, 0), (1024, 77)):
            alone, own = run(mine, {slot: spec}, size, first)
            assert [d_M[owner == slot].tobytes() for d_M in together] == [d_M.tobytes() for d_M in alone], spec
            same, wanted = run_metrics(sums, slot, spec.kind), run_metrics(own, slot, spec.kind)
            assert same == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("kind", LOSSES)
def test_what_a_kind_does_not_read_cannot_leak_out_of_it(kind, poison):
    """Whatever stands in the place of what a loss does not read, and whatever the other kinds would make of it."""
    unread = {"ref": poison, "value": poison, "old_value": poison, "ret": poison, "entropy": poison}
    if not LOSSES[kind].is_policy:
        unread["mu"] = poison
    if kind == "dpo":
        unread.pop("ref")
    if LOSSES[kind].has_critic:
        unread = {"ref": poison, "entropy": poison}
    clean = [Token(-1.0, -1.2, 1.0, ref=-1.5), Token(-2.0, -1.9, 1.0, ref=-1.5)]
    dirty = [dataclasses.replace(t, **unread) for t in clean]
    others = [Sequence_(slot, [Token(-1.0, -1.0, 1.0, ref=-1.5), Token(-2.0, -2.0, 1.0, ref=-1.5)], pair=slot) for slot in range(1, 12)]
    specs = {0: PLAIN[kind]} | dict(enumerate(PLAIN.values(), 1))
    (got, sums), (want, _) = (run([Sequence_(0, tokens), *others], specs) for tokens in (dirty, clean))
    assert [d_M.tobytes() for d_M in got] == [d_M.tobytes() for d_M in want]
    finite = [np.isfinite(m).all() for name, m in zip(sums._fields, sums, strict=True) if name != "entropy_A"]
    assert all(finite)


def test_a_new_mixture_of_kinds_and_settings_compiles_nothing():
    traces = []
    counted = jax.jit(lambda *args: traces.append(1) or cotangents(*args))
    everything = list((SPECS | CORRECTED).values())
    for turn in range(6):
        specs = {slot: everything[(17 * slot + 5 * turn) % len(everything)] for slot in range(NUM_SLOTS)}
        outputs, inputs = arrays([Sequence_(slot, [Token(-1.0, -1.0)], slot) for slot in range(NUM_SLOTS)], 64)
        counted(outputs, inputs, loss_table(specs, NUM_SLOTS))
    assert len(traces) == 1


def outputs_of(packed: Microbatch) -> TokenOutputs:
    """Stand-in for a model: some function of the behavior log-prob and the target."""
    e = packed.entries
    th_M = (e.behavior_logprobs_M + 0.3 * np.sin(e.target_M + e.behavior_logprobs_M)).astype(np.float32)
    return TokenOutputs(th_M, np.ones_like(th_M), np.cos(th_M))


def trained(packs: Sequence[Microbatch], slot: int, table: LossTable) -> tuple[list[np.ndarray], dict[str, float]]:
    """A slot's cotangents over all passes, in order, and its metrics."""
    parts, sums = [], None
    for packed in packs:
        e = packed.entries
        inputs = loss_inputs_of(
            e,
            packed.slot_M,
            reference_logprobs_M=e.behavior_logprobs_M - np.float32(0.1),
            returns_M=e.advantage_M,
            behavior_values_M=np.sin(e.advantage_M),
            staleness_M=1 + e.target_M % 3,
        )
        result, metrics = jitted(outputs_of(packed), inputs, table)
        is_mine = (packed.slot_M == slot) & (e.weight_M != 0)
        parts.append([np.asarray(d_M)[is_mine] for d_M in result])
        sums = metrics if sums is None else jax.tree.map(np.add, sums, metrics)
    assert sums is not None
    return [np.concatenate(columns) for columns in zip(*parts, strict=True)], run_metrics(sums, slot, list(LOSSES)[table["kind"][slot]])


def splits(denominator: str) -> tuple[int, list[list[Microbatch]]]:
    """The number of a run's entries, and its batch in one pass, in passes of 1, 2 and 8 pieces, and in twos behind a neighbour and before another."""
    small, sizes = microbatch_shape(256), [microbatch_shape(size) for size in (256, 512, 1024, 4096)]
    tree, _ = build_tree(forked_batch(8, 8, prompt=60), algorithm(denominator=denominator))
    pieces = cut(tree, small)
    assert len(pieces) >= 8
    before, after = (cut(build_tree(forked_batch(1, seed=s), algorithm())[0], small)[:1] for s in (2, 3))

    def packed(planned: Sequence[PlannedPiece]) -> Microbatch:
        num_tiles, num_entries = sum(p.piece.num_tiles for p in planned), sum(len(p.piece.entries) + 64 for p in planned)
        return pack(MicrobatchPlan(next(shape for shape in sizes if shape.holds(num_tiles, num_entries)), tuple(planned)))

    def passes(size: int, *, has_neighbours: bool = False) -> list[Microbatch]:
        """Passes of at most `size` of the run's pieces."""
        result = []
        for start in range(0, len(pieces), size):
            planned = [PlannedPiece("mine", 1, start + k, piece) for k, piece in enumerate(pieces[start : start + size])]
            if has_neighbours:
                planned = [PlannedPiece("other-2", 2, 0, before[0]), *planned, PlannedPiece("other-3", 3, 0, after[0])]
            result.append(packed(planned))
        return result

    return len(tree.entries), [passes(len(pieces)), passes(1), passes(2), passes(8), passes(2, has_neighbours=True)]


@pytest.mark.parametrize("denominator", ["tokens", "episodes", "groups", "none"])
def test_a_runs_cotangents_are_bit_equal_alone_split_and_beside_neighbours(denominator):
    num_entries, (whole, *others) = splits(denominator)
    names = [*PLAIN, "grpo+kl", "grpo+lag", "stable_reinforce+kl"] if denominator == "tokens" else ["grpo", "gspo", "ppo_critic"]
    for spec in (SPECS[name] for name in names):
        if scope_of(spec) in ("pair", "batch"):
            continue  # no pass may split these
        table = loss_table({1: spec, 2: LossSpec(sequence_mask_c=0.0), 3: LossSpec(kind="cross_entropy")}, 4)
        want, metrics = trained(whole, 1, table)
        assert len(want[0]) == num_entries
        assert want[0].any()
        for packs in others:
            got, split_metrics = trained(packs, 1, table)
            assert [d_M.tobytes() for d_M in got] == [d_M.tobytes() for d_M in want], spec
            assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)


def test_runs_without_pairs_are_no_part_of_pair_zero():
    """Inputs that a run does not use are zeros, and 0 is the number of a pair."""
    pair = [Sequence_(0, [Token(-1.0, -1.0, side, ref=-1.0 - side)], pair=0) for side in (1.0, -1.0)]
    others = [Sequence_(slot, [Token(-1.0, -1.0, 1.0, ref=-3.0)], pair=0) for slot, kind in enumerate(PLAIN) if kind != "dpo" and slot]
    specs = dict(enumerate(PLAIN.values())) | {0: PLAIN["dpo"]}
    (alone, sums), (beside, more) = run(pair, specs), run([*pair, *others], specs)
    assert [d_M[:2].tobytes() for d_M in beside] == [d_M.tobytes() for d_M in alone]
    assert run_metrics(more, 0, "dpo") == run_metrics(sums, 0, "dpo")
    assert run_metrics(more, 0, "dpo")["num_pairs"] == 1.0
