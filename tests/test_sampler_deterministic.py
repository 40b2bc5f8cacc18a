"""A deterministic run's completions, bit for bit: alone or beside others, whenever its requests come, and whatever of its prompts is still cached.

Decode widths 8 and 64 have different bits on the tiny base (JAX 0.10 and 0.12), and so have decoded and prefilled K/V: without the mode these fail.
"""

import asyncio
import random
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_builders import adapter, drive, engine, prompt, request, run, tiny
from sampler_simulation import build

from noria.model.lora import HEAD, INPUT_GROUPS, checksum, delta, host_shapes, module_sizes
from noria.sampler.adapters import AdapterSlots, layer_deltas, plan_rows
from noria.sampler.runner import Shapes
from noria.sampler.sequence import PrefillDispatch

SHAPES = Shapes(lanes=(8, 64), rows=(4, 16))
NUM_PAGES = 320
GROUPS, MEMBERS, TURNS = 3, 4, 3


def server():
    sampler = engine(shapes=SHAPES, num_lanes=64, num_pages=NUM_PAGES)
    sampler.set_deterministic("mine", is_deterministic=True)
    for number, run_id in enumerate(("mine", "busy")):
        sampler.publish(run_id, 0, adapter(number, size=0.05), 1.0)
    return sampler


async def ticks(number):
    for _ in range(number):
        await asyncio.sleep(0)


async def episode(sampler, rng, group, member):
    """Turns that each build on what was sampled before, after pauses of random length: what they are answered with."""
    ids, answers = prompt(30 + 13 * group, seed=group), []
    for turn in range(TURNS):
        await ticks(rng.randrange(30))
        name = f"{group}/{member}/{rng.random()}"
        asked = request(ids, run="mine", tenant="mine", episode=name, max_tokens=9, seed=100 * group + turn, sample_index=member)
        answer = await sampler.sample(asked)
        answers.append((answer.sampled_ids, answer.behavior_logprobs))
        ids = asked.prompt_ids + answer.sampled_ids + prompt(5, seed=50 + turn)
    return answers


async def neighbour(sampler, rng, number):
    await ticks(rng.randrange(60))
    ids = prompt(rng.randrange(1, 90), seed=number)
    await sampler.sample(request(ids, run="busy", tenant=rng.choice("ab"), max_tokens=rng.randrange(1, 40), seed=number, temperature=0.7))


def play(sampler, seed, num_neighbours=0):
    rng = random.Random(seed)

    async def main():
        mine = [(group, member) for group in range(GROUPS) for member in range(MEMBERS)]
        rng.shuffle(mine)
        others = [neighbour(sampler, rng, number) for number in range(num_neighbours)]
        answers = await drive(sampler, *(episode(sampler, rng, *which) for which in mine), *others)
        return dict(zip(mine, answers, strict=False))

    return asyncio.run(main())


@cache
def alone():
    return play(server(), 0)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), num_neighbours=st.integers(0, 80), is_warm=st.booleans())
def test_a_deterministic_runs_completions_are_the_same_bit_for_bit(seed, num_neighbours, is_warm):
    sampler = server()
    if is_warm:
        assert play(sampler, seed + 1, num_neighbours) == alone()
    assert play(sampler, seed, num_neighbours) == alone()


def test_what_a_deterministic_run_has_prefilled_is_shared_and_what_it_decoded_is_prefilled_once_more():
    sampler = server()
    (first,) = asyncio.run(drive(sampler, sampler.sample(request(prompt(40), run="mine", episode="e", max_tokens=10))))
    assert sampler.counts.num_prefilled == 39
    later = prompt(40) + first.sampled_ids + prompt(7, seed=3)
    group = [request(later, run="mine", episode=f"e{member}", max_tokens=4, sample_index=member) for member in range(4)]
    asyncio.run(drive(sampler, *(sampler.sample(one) for one in group)))
    assert sampler.counts.num_prefilled == len(later) - 1


def test_dispatches_with_requests_of_a_deterministic_run_have_one_shape_and_others_ride_along():
    device = build(1024, widths=(8, 64), rows=16, runs=("mine", "busy"), fixed=(32, 4))
    device.scheduler.set_deterministic("mine", is_deterministic=True)
    rng = random.Random(0)
    runs = [rng.choice(("mine", "busy")) for _ in range(100)]
    unfinished = {device.submit(prompt(40, seed=n), run=run, tenant="ab"[n % 2], max_tokens=20) for n, run in enumerate(runs)}
    while unfinished:
        unfinished.difference_update(device.step())
    kinds = set()
    for dispatch in device.dispatches:
        is_prefill = isinstance(dispatch, PrefillDispatch)
        slots_of = {row.slot for row in dispatch.rows} if is_prefill else {tile.slot for tile in dispatch.tiles}
        has_mine = device.slots.slot("mine", 0) in slots_of
        assert dispatch.is_fixed == has_mine
        if has_mine:
            assert len(dispatch.rows) <= 4 if is_prefill else len(dispatch.tiles) <= 32 // 8
        kinds.add((is_prefill, has_mine, len(slots_of)))
    assert {(False, True, 2), (True, True, 2)} <= kinds, "others must have ridden along"
    device.scheduler.set_deterministic("mine", is_deterministic=False)
    device.submit(prompt(40, seed=500), run="mine")
    device.step()
    assert not device.dispatches[-1].is_fixed


def test_more_tiles_than_the_fixed_shape_has_take_turns_and_without_the_run_all_lanes_are_used():
    device = build(1024, widths=(8, 64), rows=16, runs=("mine", "busy"), fixed=(32, 4))
    device.scheduler.set_deterministic("mine", is_deterministic=True)
    unfinished = {device.submit((n,), run="busy", tenant="b", max_tokens=100) for n in range(64)}
    device.step()
    assert len(device.dispatches[-1].tiles) == 8
    mine = {device.submit((n,), run="mine", tenant="m", max_tokens=20) for n in range(24)}
    unfinished |= mine
    while unfinished:
        has_mine = bool(unfinished & mine)
        unfinished.difference_update(device.step())
        num_tiles = len(device.dispatches[-1].tiles)
        assert num_tiles <= 4 if has_mine else num_tiles > 0
    assert [len(dispatch.tiles) for dispatch in device.dispatches if dispatch.is_fixed].count(4) >= 5, "there must have been more than fit"
    assert max(len(dispatch.tiles) for dispatch in device.dispatches[2:]) > 4


def test_the_fixed_shape_is_one_of_the_closed_set():
    for shapes in (Shapes((8, 32, 64), (4, 16)), Shapes((8,), (4,)), Shapes((8, 16), (2, 4, 8))):
        lanes, rows = shapes.fixed
        assert lanes in shapes.lanes
        assert rows in shapes.rows


NARROW = Shapes(lanes=(16,), rows=(4,), tops=(HEAD,))
NEIGHBOURS = {"rank 8": 8, "rank 20": 20, "rank 64": 64}


def with_neighbours(rank_classes, neighbours):
    """What "mine", of rank 4, is answered beside runs of these names, and the engine."""
    sampler = engine(rank_classes=rank_classes, shapes=NARROW)
    sampler.set_deterministic("mine", is_deterministic=True)
    for seed, run_id in enumerate(("mine", *neighbours)):
        sampler.publish(run_id, 0, adapter(seed, 0.1, rank=NEIGHBOURS.get(run_id, 4), tops=(HEAD,)), 0.5)
    asked = [request(prompt(30 + n, seed=n), run="mine", max_tokens=12, seed=n) for n in range(5)]
    asked += [request(prompt(25, seed=n), run=run_id, tenant=run_id, max_tokens=9, seed=n) for run_id in neighbours for n in range(3)]
    answers = run(sampler, *asked)
    return [(answer.sampled_ids, answer.behavior_logprobs) for answer in answers[:5]], sampler


def test_a_deterministic_runs_completions_do_not_depend_on_the_ranks_of_others():
    """Other rank classes compiled in, used or not, change no bit; and every version's bytes are the committed ones."""
    expected, _ = with_neighbours((8,), [])
    assert with_neighbours((8,), ["rank 8"])[0] == expected
    for neighbours in ([], ["rank 64"], list(NEIGHBOURS)):
        found, sampler = with_neighbours((8, 32, 128), neighbours)
        assert found == expected, neighbours
        for seed, run_id in enumerate(("mine", *neighbours)):
            assert sampler.checksum(run_id, 0) == checksum(adapter(seed, 0.1, rank=NEIGHBOURS.get(run_id, 4), tops=(HEAD,)))


def test_a_version_takes_the_bytes_of_its_own_class_only():
    sampler = engine(rank_classes=(8, 32, 128), shapes=NARROW, num_slots=2)
    for version, rank in enumerate((64, 4, 20, 8)):
        sampler.publish("mine", version, adapter(version, rank=rank), 1.0)  # one slot, and another class each time
        assert sampler.checksum("mine", version) == checksum(adapter(version, rank=rank))
        slots = sampler._runner._slots.arrays
        assert [stack.layers[0]["b"]["q"].shape[1] for stack in slots.stacks] == [8, 32, 128]
        assert int(slots.class_A[1]) == {64: 2, 4: 0, 20: 1, 8: 0}[rank]
        (found,) = run(sampler, request(prompt(20), run="mine", max_tokens=6))
        alone = engine(rank_classes=(8, 32, 128), shapes=NARROW)
        alone.publish("mine", version, adapter(version, rank=rank), 1.0)
        (expected,) = run(alone, request(prompt(20), run="mine", max_tokens=6))
        assert found == expected, "nothing of the versions before may be left"


def random_slots(model, classes, ranks):
    """Slots that hold an adapter of each rank from slot 1 on, those of rank 64 broken; and the adapters."""
    slots, rng, adapters = AdapterSlots(model, 5, classes, ()), np.random.default_rng(0), []
    for slot, rank in enumerate(ranks, 1):
        shapes = host_shapes(model, rank, ())
        adapters.append({side: {m: rng.normal(0, 0.1, shape).astype(np.float32) for m, shape in shapes[side].items()} for side in shapes})
        if rank == 64:
            adapters[-1]["b"]["q"][:] = np.nan
        slots.write(slot, adapters[-1], 0.5)
    return slots, adapters


@pytest.mark.parametrize("max_gathered", [0, 2**30], ids=["row after row", "gathered"])
@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize("others", [(), (64,), (20, 64)])
def test_a_rows_delta_is_the_one_of_its_own_class_bit_for_bit(others, length, max_gathered):
    """Sizes at which the widths 8, 32 and 128 have different bits. A neighbour's broken adapter stays its own; the base's rows are left alone."""
    model = replace(tiny()[0], num_layers=1, hidden_size=576, intermediate_size=1536)
    slots, adapters = random_slots(model, (8, 32, 128), (4, *others))
    alone, _ = random_slots(model, (8,), (4,))

    def add(slots, group, x, ys, slot_R):
        return layer_deltas(slots, 0, plan_rows(slots, slot_R, max_gathered=max_gathered)).add(group, x, ys)

    slot_R, rng, run = np.array([1, 0, len(adapters), 1], np.int32), np.random.default_rng(1), jax.jit(add, static_argnums=1)
    for group in INPUT_GROUPS:
        sizes = [module_sizes(model)[module] for module in group]
        x = rng.normal(0, 1, (4, length, sizes[0][0])).astype(np.float32)
        ys = tuple(rng.normal(0, 1, (4, length, size)).astype(np.float32) for _, size in sizes)
        for y in ys:
            y[1] = -0.0 if not max_gathered or others else 1.0
        found, expected = (run(of.arrays, group, x, ys, slots) for of, slots in ((slots, slot_R), (alone, np.array([1, 0, 0, 1], np.int32))))
        for module, y, new, same in zip(group, ys, map(np.asarray, found), map(np.asarray, expected), strict=True):
            assert new[[0, 3]].tobytes() == same[[0, 3]].tobytes(), module
            factors = (adapters[0][side][module] for side in ("a", "b"))
            plain = y[[0, 3]] + np.asarray(delta(x[[0, 3]], *(np.repeat(each, 2, axis=0) for each in factors), np.full(2, 0.5, np.float32)))
            np.testing.assert_allclose(new[[0, 3]], plain, atol=1e-5)
            assert new[1].tobytes() == y[1].tobytes()
            assert (new[2] != y[2]).any()


def rows_of_two_classes(seed, *shape):
    """Slots with adapters of the classes 8 and 32, and rows of this shape that ask for them: (slots, x, y, slot_R)."""
    model = replace(tiny()[0], num_layers=1, hidden_size=576, intermediate_size=1536)
    slots, _ = random_slots(model, (8, 32), (8, 4, 20, 32))
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(0, 1, (*shape, size)).astype(np.float32) for size in (576, 1536))
    return slots.arrays, x, y, rng.integers(0, 5, shape[0]).astype(np.int32)


def gate_and_up(slots, x, y, slot_R, max_gathered):
    return layer_deltas(slots, 0, plan_rows(slots, slot_R, max_gathered=max_gathered)).add(("gate", "up"), x, (y, 2 * y))


def test_rows_are_gathered_as_long_as_their_copies_are_small_enough_and_either_way_gives_the_same():
    """By class and input: first neither fits, then the copies of class 8, then those of class 32 too."""
    asked = rows_of_two_classes(3, 8, 4)
    copies = {width: 4 * 8 * 2 * width * (576 + 1536) for width in (8, 32)}
    found = []
    for limit, num_gathered in ((0, 0), (copies[8] - 1, 0), (copies[8], 1), (copies[32] - 1, 1), (copies[32], 2)):
        traced = str(jax.make_jaxpr(gate_and_up, static_argnums=4)(*asked, limit))
        assert traced.count(" cond[") == num_gathered
        assert traced.count(" while[") == 2 - num_gathered
        found.append(jax.jit(gate_and_up, static_argnums=4)(*asked, limit))
    for each in found[1:]:
        for one, other in zip(found[0], each, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_gathered_row_has_the_same_bits_among_four_and_among_sixteen():
    slots, *rows = rows_of_two_classes(4, 16, 32)
    add = jax.jit(gate_and_up, static_argnums=4)
    for wide, narrow in zip(add(slots, *rows, 2**30), add(slots, *(each[:4] for each in rows), 2**30), strict=True):
        assert np.asarray(wide)[:4].tobytes() == np.asarray(narrow).tobytes()


def test_a_lane_has_the_same_bits_in_a_row_of_its_own_and_beside_others_wherever_it_is():
    slots, x, y, slot_R = rows_of_two_classes(2, 16, 1)
    add = jax.jit(gate_and_up, static_argnums=4)
    found, order = add(slots, x, y, slot_R, 0), np.random.default_rng(2).permutation(16)
    moved = add(slots, x[order], y[order], slot_R[order], 0)
    only = add(slots, x, y, np.where(np.arange(16) == 3, slot_R, 0).astype(np.int32), 0)
    for one, two, three in zip(found, moved, only, strict=True):
        assert np.asarray(one)[order].tobytes() == np.asarray(two).tobytes()
        assert np.asarray(one)[3].tobytes() == np.asarray(three)[3].tobytes()
