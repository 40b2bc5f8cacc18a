"""The scheduler without a device: fair turns, places in the queue, and no page lost or written twice, whatever comes and goes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_builders import STEPS, FakeDevice, prompt, submit

from noria.sampler.pages import PagePool
from noria.sampler.scheduler import Scheduler
from noria.sampler.sequence import CHUNK, DecodeDispatch, PrefillDispatch
from noria.sampler.slots import SlotTable


def build(num_pages=512, num_lanes=16, max_rows=4, runs=("",)):
    slots = SlotTable(8)
    for run_id in runs:
        if run_id:
            slots.advance(run_id, 0)
    scheduler = Scheduler(PagePool(num_pages), slots, num_lanes=num_lanes, max_rows=max_rows)
    return scheduler, FakeDevice(scheduler), slots


def dispatches_until_finished(device, sequence):
    for number in range(1, 10_000):
        if sequence in (device.step() or []):
            return number
    raise AssertionError("never finished")


def test_a_flood_does_not_delay_another_tenant_beyond_its_fair_turn():
    """Case 97: B's one request after A's 500 takes no longer than in a batch that both fill equally."""
    scheduler, device, _ = build()
    for number in range(500):
        submit(scheduler, tenant="a", prompt=prompt(20, seed=number), max_tokens=40)
    for _ in range(10):
        device.step()
    late = submit(scheduler, tenant="b", prompt=prompt(20, seed=999), max_tokens=40)
    flooded = dispatches_until_finished(device, late)

    scheduler, device, _ = build()
    for number in range(16):
        submit(scheduler, tenant="ab"[number % 2], prompt=prompt(20, seed=number), max_tokens=40)
    for _ in range(10):
        device.step()
    fair = submit(scheduler, tenant="b", prompt=prompt(20, seed=999), max_tokens=40)
    assert flooded <= 1.15 * dispatches_until_finished(device, fair) + 1


def test_a_newcomer_does_not_wait_for_long_requests_to_end():
    scheduler, device, _ = build()
    for number in range(40):
        submit(scheduler, tenant="a", prompt=(number,), max_tokens=200)
    for _ in range(5):
        device.step()
    late = submit(scheduler, tenant="b", prompt=prompt(20), max_tokens=8)
    assert dispatches_until_finished(device, late) <= 4


def test_tenants_get_tokens_in_proportion_to_their_weights():
    scheduler, device, _ = build(num_lanes=32)
    scheduler.set_weight("heavy", 3.0)
    for number in range(200):
        for tenant in ("heavy", "light"):
            submit(scheduler, tenant=tenant, prompt=prompt(10, seed=number), max_tokens=30)
    for _ in range(60):
        device.step()
    assert 2.5 < device.num_sampled["heavy"] / device.num_sampled["light"] < 3.5


def test_more_tenants_than_tiles_take_turns():
    scheduler, device, _ = build(num_lanes=16)
    for name in "abcdef":
        submit(scheduler, tenant=name, prompt=(5,), max_tokens=200)
    for _ in range(30):
        device.step()
    assert len(device.num_sampled) == 6
    assert max(device.num_sampled.values()) - min(device.num_sampled.values()) <= 2 * STEPS


def test_a_long_prompt_does_not_stall_decoding():
    scheduler, device, _ = build()
    submit(scheduler, prompt=(5,), max_tokens=60)
    device.step()
    submit(scheduler, prompt=prompt(2000), max_tokens=4)
    for _ in range(12):
        device.step()
    kinds = [type(dispatch) for dispatch in device.dispatches[1:]]
    assert kinds == [PrefillDispatch, DecodeDispatch] * 6
    assert all(len(dispatch.rows) <= 4 for dispatch in device.dispatches if isinstance(dispatch, PrefillDispatch))


def test_rows_of_one_prompt_are_consecutive_and_cover_all_but_the_last_id():
    scheduler, device, _ = build()
    ids = prompt(300)
    submit(scheduler, prompt=ids, max_tokens=1)
    while device.step() is not None:
        pass
    rows = [row for dispatch in device.dispatches if isinstance(dispatch, PrefillDispatch) for row in dispatch.rows]
    assert tuple(i for row in rows for i in row.ids) == ids[:-1]
    assert [row.start for row in rows] == list(range(0, 299, CHUNK))


def test_a_request_too_big_for_now_waits_and_is_not_overtaken():
    scheduler, device, _ = build(num_pages=40)
    first = submit(scheduler, prompt=(5,), max_tokens=500)
    device.step()
    big = submit(scheduler, prompt=(6,), max_tokens=400)
    small = submit(scheduler, prompt=(7,), max_tokens=4)
    device.step()
    waiting = {w.request_id: (w.position, w.reason) for w in scheduler.waiting()}
    assert waiting == {first.request.request_id: (0, "decoding"), big.request.request_id: (0, "pages"), small.request.request_id: (1, "pages")}
    finished = [sequence for _ in range(300) for sequence in device.step() or []]
    assert finished.index(first) == 0
    assert set(finished) == {first, big, small}


def test_tiles_hold_one_slot_each():
    scheduler, device, slots = build(runs=("", "a", "b"))
    for number in range(30):
        submit(scheduler, run=("", "a", "b")[number % 3], tenant="xy"[number % 2], prompt=prompt(3, seed=number), max_tokens=9)
    while device.step() is not None:
        pass
    for dispatch in device.dispatches:
        if isinstance(dispatch, DecodeDispatch):
            assert dispatch.num_lanes <= 16
            for tile in dispatch.tiles:
                assert {slots.slot(s.request.run_id, 0) for s in tile.sequences} == {tile.slot}
                assert len(tile.sequences) <= 8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(24, 80))
def test_whatever_comes_and_goes_pages_have_one_writer_and_everything_ends(seed, num_pages):
    rng = random.Random(seed)
    scheduler, device, slots = build(num_pages=num_pages, runs=("", "a"))
    scheduler.set_deterministic("a", is_deterministic=rng.random() < 0.5)
    live, versions, done = [], 0, 0
    for _ in range(120):
        action = rng.random()
        if action < 0.3 and len(live) < 40:
            episode = rng.choice(("", "e1", "e2"))
            ids = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 100)))
            live.append(
                submit(scheduler, run=rng.choice(("", "a")), tenant=rng.choice("tu"), prompt=ids, episode=episode, max_tokens=rng.randrange(1, 60))
            )
        elif action < 0.4 and live:
            scheduler.cancel(live.pop(rng.randrange(len(live))))
        elif action < 0.45 and slots.has_room("a"):
            versions += 1
            slots.advance("a", versions)
        else:
            before, num_dispatches = live.copy(), len(device.dispatches)
            for sequence in device.step() or []:
                live.remove(sequence)
                done += 1
            _check_prefilled_pages(device.dispatches[num_dispatches:], before)
        _check_writers(live)
    while (finished := device.step()) is not None:
        done += len(finished)
        for sequence in finished:
            live.remove(sequence)
    assert (live, scheduler.pool.num_held, scheduler.has_work) == ([], 0, False)
    assert slots.num_free == 6


def _check_writers(live):
    active = [sequence for sequence in live if sequence.table]
    own = [page for sequence in active for page in sequence.own_pages]
    shared = {node.page for sequence in active for node in sequence.chain}
    assert len(own) == len(set(own))
    assert not shared & set(own)
    for sequence in active:
        assert len(sequence.table) == sequence.num_table_pages
        assert tuple(i for node in sequence.chain for i in node.ids) == sequence.request.prompt_ids[: 16 * len(sequence.chain)]


def _check_prefilled_pages(dispatches, live):
    """A prefill writes only to pages that a request waits for, and that none has of its own."""
    waited_for = {node.page for s in live for node in (*s.chain, *([s.source] if s.source else []))}
    own = {page for s in live for page in s.own_pages}
    for row in (row for dispatch in dispatches if isinstance(dispatch, PrefillDispatch) for row in dispatch.rows):
        written = set(row.table[row.start // 16 :])
        assert written <= waited_for
        assert not written & own
