"""A deterministic run's completions, bit for bit: alone or beside others, whenever its requests come, and whatever of its prompts is still cached.

Decode widths 8 and 64 have different bits on the tiny base (JAX 0.10 and 0.12), and so have decoded and prefilled K/V: without the mode these fail.
"""

import asyncio
import random
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_builders import FakeDevice, adapter, drive, engine, prompt, request, submit

from noria.sampler.pages import PagePool
from noria.sampler.runner import Shapes
from noria.sampler.scheduler import Scheduler
from noria.sampler.sequence import PrefillDispatch
from noria.sampler.slots import SlotTable

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
    slots = SlotTable(8)
    for run_id in ("mine", "busy"):
        slots.advance(run_id, 0)
    scheduler = Scheduler(PagePool(1024), slots, num_lanes=64, max_rows=16, fixed=(32, 4))
    scheduler.set_deterministic("mine", is_deterministic=True)
    device, rng = FakeDevice(scheduler), random.Random(0)
    runs = [rng.choice(("mine", "busy")) for _ in range(100)]
    unfinished = {submit(scheduler, run=run, tenant="ab"[n % 2], prompt=prompt(40, seed=n), max_tokens=20) for n, run in enumerate(runs)}
    while unfinished:
        unfinished.difference_update(device.step())
    kinds = set()
    for dispatch in device.dispatches:
        is_prefill = isinstance(dispatch, PrefillDispatch)
        slots_of = {row.slot for row in dispatch.rows} if is_prefill else {tile.slot for tile in dispatch.tiles}
        has_mine = slots.slot("mine", 0) in slots_of
        assert dispatch.is_fixed == has_mine
        if has_mine:
            assert len(dispatch.rows) <= 4 if is_prefill else len(dispatch.tiles) <= 32 // 8
        kinds.add((is_prefill, has_mine, len(slots_of)))
    assert {(False, True, 2), (True, True, 2)} <= kinds, "others must have ridden along"
    scheduler.set_deterministic("mine", is_deterministic=False)
    submit(scheduler, run="mine", prompt=prompt(40, seed=500))
    device.step()
    assert not device.dispatches[-1].is_fixed


def test_more_tiles_than_the_fixed_shape_has_take_turns_and_without_the_run_all_lanes_are_used():
    slots = SlotTable(8)
    for run_id in ("mine", "busy"):
        slots.advance(run_id, 0)
    scheduler = Scheduler(PagePool(1024), slots, num_lanes=64, max_rows=16, fixed=(32, 4))
    scheduler.set_deterministic("mine", is_deterministic=True)
    device = FakeDevice(scheduler)
    unfinished = {submit(scheduler, run="busy", tenant="b", prompt=(n,), max_tokens=100) for n in range(64)}
    device.step()
    assert len(device.dispatches[-1].tiles) == 8
    mine = {submit(scheduler, run="mine", tenant="m", prompt=(n,), max_tokens=20) for n in range(24)}
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
