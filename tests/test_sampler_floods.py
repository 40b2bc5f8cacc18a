"""Who waits for whom, in dispatches, on a simulated device: floods of every kind, and very long prompts."""

import random
from collections import Counter
from itertools import count

import pytest
from sampler_simulation import build

from noria.sampler.sequence import PrefillDispatch

LANES = 16


def ids(length, seed=0):
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 1000) for _ in range(length))


FLOODS = {
    "short": {"length": 20, "max_tokens": 40},
    "long prompts": {"length": 700, "max_tokens": 40},
    "one id each": {"length": 1, "max_tokens": 40},
    "long completions": {"length": 20, "max_tokens": 400},
    "one token each": {"length": 40, "max_tokens": 1},
    "scored prompts": {"length": 200, "max_tokens": 8, "wants_prompt": True},
    "one episode": {"length": 60, "max_tokens": 40, "episode": "e"},
    "many runs": {"length": 20, "max_tokens": 40, "runs": "cdefgh"},
}


def latecomer(flood, num_unfinished, *, num_pages, seed, late_tokens=40):
    """Dispatches that tenant b's one request takes, and those until it is first in one, while each tenant has so many unfinished ones beside it."""
    device = build(num_pages, widths=(LANES,), slots=4, runs="bcdefgh", seed=seed)
    rng, numbers, unfinished = random.Random(seed), count(), Counter()

    def step():
        """Every tenant has what it should have; then one dispatch."""
        for tenant, number in num_unfinished.items():
            while unfinished[tenant] < number:
                options = dict(flood)
                length, runs = options.pop("length"), options.pop("runs", "")
                device.submit(ids(length, next(numbers)), tenant=tenant, run=rng.choice(runs) if runs else "", **options)
                unfinished[tenant] += 1
        finished = device.step() or []
        unfinished.subtract(sequence.request.tenant for sequence in finished)
        return finished

    for _ in range(10 + seed):
        step()
    late = device.submit(ids(20, 10**6), tenant="b", run="b", max_tokens=late_tokens)
    before, is_done = len(device.dispatches), False
    while not is_done:
        is_done = late in step()
    mine = device.dispatches[before:]
    assert len(late.sampled_ids) == late_tokens
    return len(mine), next(number for number, dispatch in enumerate(mine) if is_in(late, dispatch))


def is_in(sequence, dispatch):
    if isinstance(dispatch, PrefillDispatch):
        return any(row.ids == sequence.request.prompt_ids[:-1] for row in dispatch.rows)
    return any(sequence in tile.sequences for tile in dispatch.tiles)


@pytest.mark.parametrize("num_pages", [2048, 120])
@pytest.mark.parametrize("flood", FLOODS)
def test_behind_a_flood_of_any_kind_another_tenants_request_takes_its_fair_turn(flood, num_pages):
    """Case 97: in a dispatch at most one later, and done after at most 1.15 times as many, as in a batch that both tenants keep equally full."""
    for seed in range(2):
        flooded, first = latecomer(FLOODS[flood], {"a": 500}, num_pages=num_pages, seed=seed)
        fair, turn = latecomer(FLOODS[flood], {"a": LANES // 2, "b": LANES // 2 - 1}, num_pages=num_pages, seed=seed)
        assert first <= turn + 1, (seed, first, turn)
        assert flooded <= 1.15 * fair, (seed, flooded, fair)


def gaps(device, watched):
    """The longest wait, in dispatches, between two dispatches that sample for each of the watched, from its first to its last."""
    longest, last = 0, {}
    for number, dispatch in enumerate(device.dispatches):
        if not isinstance(dispatch, PrefillDispatch):
            for sequence in (sequence for tile in dispatch.tiles for sequence in tile.sequences if sequence in watched):
                longest = max(longest, number - last.get(sequence, number))
                last[sequence] = number
    assert set(last) == set(watched)
    return longest


@pytest.mark.parametrize("wants_prompt", [False, True])
@pytest.mark.parametrize("is_same_tenant", [True, False])
def test_prompts_of_16k_stall_no_one(wants_prompt, is_same_tenant):
    """Others sample in every second dispatch throughout, newcomers begin at once, and the long prompts get on."""
    device = build(4096, widths=(LANES,), rows=16)
    watched = [device.submit(ids(10, number), max_tokens=400) for number in range(6)]
    for _ in range(3):
        device.step()
    long = [device.submit(ids(16_384, n), tenant="t" if is_same_tenant else "l", max_tokens=4, wants_prompt=wants_prompt) for n in range(2)]
    begun = len(device.dispatches)
    for number in range(20):
        short = device.submit(ids(30, 100 + number), max_tokens=4)
        for _ in range(4):
            device.step()
        assert short.sampled_ids
    assert not all(one.is_prefilled for one in long)
    device.finish()
    assert gaps(device, watched) == 2
    assert all(len(one.sampled_ids) == 4 for one in long)
    num_prefills = sum(isinstance(dispatch, PrefillDispatch) for dispatch in device.dispatches[begun:])
    assert num_prefills <= 1.3 * (2 * 16_384 / (16 * 32)) + 20, "rows are full of what the long prompts have left"
