"""The scheduler on a simulated device: fair turns, places in the queue, and what a dispatch is made of."""

import random

import pytest
from sampler_simulation import STEPS, build

from noria.errors import QueueFullError
from noria.sampler.sequence import BLOCK_PAGES, CHUNK, DecodeDispatch, PrefillDispatch
from noria.sampler.tenants import MAX_IDLE, MAX_OVERTAKEN


def ids(length, seed=0):
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 1000) for _ in range(length))


def steps_until(device, is_so, limit=5000):
    """Dispatches until it is so, looked at after each."""
    for number in range(1, limit):
        finished = device.step() or []
        if is_so(finished):
            return number
    raise AssertionError("never")


def run_steps(device, number):
    return [sequence for _ in range(number) for sequence in device.step() or []]


def decodes(device):
    return [dispatch for dispatch in device.dispatches if isinstance(dispatch, DecodeDispatch)]


def prefills(device):
    return [dispatch for dispatch in device.dispatches if isinstance(dispatch, PrefillDispatch)]


def reasons(device):
    return {one.request_id: (one.position, one.reason) for one in device.scheduler.waiting()}


# Fairness


def latecomer(num_flooding, num_fair, num_pages):
    """Dispatches that tenant b's one request takes, after num_flooding of a's and num_fair of each, and those until its first row."""
    device = build(num_pages)
    for number in range(num_flooding):
        device.submit(ids(20, number), tenant="a", max_tokens=40)
    for number in range(num_fair):
        device.submit(ids(20, number), tenant="ab"[number % 2], max_tokens=40)
    run_steps(device, 10)
    late = device.submit(ids(20, 999), tenant="b", max_tokens=40)
    number = len(device.dispatches)
    total = steps_until(device, lambda finished: late in finished)
    rows = [[row.ids for row in d.rows] if isinstance(d, PrefillDispatch) else [] for d in device.dispatches[number:]]
    first = next(n for n, ids_of_rows in enumerate(rows) if late.request.prompt_ids[:-1] in ids_of_rows)
    return total, first


@pytest.mark.parametrize("num_pages", [512, 40])
def test_a_flood_does_not_delay_another_tenant_beyond_its_fair_turn(num_pages):
    """Case 97: B's one request after A's 500 takes at most 1.15 times as long as in a batch that both fill equally, also when pages are short."""
    flooded, first = latecomer(500, 0, num_pages)
    fair, _ = latecomer(0, 16, num_pages)
    assert first <= 1
    assert flooded <= 1.15 * fair


def test_a_newcomer_does_not_wait_for_long_requests_to_end():
    device = build()
    for number in range(40):
        device.submit((number + 3,), tenant="a", max_tokens=200)
    run_steps(device, 5)
    late = device.submit(ids(20), tenant="b", max_tokens=8)
    assert steps_until(device, lambda finished: late in finished) <= 4


def test_tenants_get_tokens_in_proportion_to_their_weights():
    device = build(widths=(32,))
    device.scheduler.set_weight("heavy", 3.0)
    for number in range(200):
        for tenant in ("heavy", "light"):
            device.submit(ids(10, number), tenant=tenant, max_tokens=30)
    run_steps(device, 60)
    assert 2.5 < device.num_sampled["heavy"] / device.num_sampled["light"] < 3.5


def test_more_tenants_than_lanes_take_turns():
    device = build(widths=(8,), slots=32, runs="abcdefghijkl")
    for name in "abcdefghijkl":
        device.submit((5,), run=name, tenant=name, max_tokens=200)
    run_steps(device, 30)
    assert len(device.num_sampled) == 12
    assert max(device.num_sampled.values()) - min(device.num_sampled.values()) <= 2 * STEPS
    assert "fairness" in {reason for _, reason in reasons(device).values()}


def test_more_versions_than_slots_take_turns_and_say_so():
    device = build(slots=3, runs="abcdef")
    mine = [device.submit((5,), run=name, tenant=name, max_tokens=40) for name in "abcdef"]
    device.step()
    assert sorted(reason for _, reason in reasons(device).values()) == ["decoding"] * 2 + ["slot"] * 4
    assert set(device.finish()) == set(mine)


def test_pages_are_preempted_for_a_tenant_below_its_share_and_for_no_other():
    device = build(40)
    mine = [device.submit((5, number), tenant="a", max_tokens=240) for number in range(2)]
    steps_until(device, lambda _: device.scheduler.pool.num_available < 10)
    late = [device.submit(ids(8 * 16, number), tenant="b", max_tokens=20) for number in range(2)]
    device.step()
    assert [reasons(device)[s.request.request_id] for s in mine] == [(0, "decoding"), (0, "pages")], "the one admitted last goes back"
    assert (late[0].turn, device.scheduler.counts.num_preempted) == (2, 1)
    assert reasons(device)[late[1].request.request_id][1] == "prefill", "into what is free: its tenant holds less even so"
    assert device.scheduler.counts.num_preempted == 1
    assert set(device.finish()) == {*mine, *late}
    assert device.scheduler.counts.num_preempted < 10


# Prefills


def test_a_long_prompt_does_not_stall_decoding():
    device = build(widths=(8, 16))
    device.submit((5,), max_tokens=60)
    device.step()
    device.submit(ids(2000), max_tokens=4)
    run_steps(device, 12)
    assert [type(dispatch) for dispatch in device.dispatches[1:]] == [PrefillDispatch, DecodeDispatch] * 6
    assert all(len(dispatch.rows) <= 4 for dispatch in prefills(device))


def test_a_long_prompt_neither_holds_up_short_ones_of_its_tenant_nor_is_held_up_by_them():
    device = build(1024, rows=4)
    long = device.submit(ids(4000), max_tokens=4)
    run_steps(device, 2)
    page = long.table[0]
    for number in range(30):
        short = device.submit(ids(40, number + 1), max_tokens=4)
        assert steps_until(device, lambda _, short=short: short.sampled_ids) <= 4
    assert not long.is_prefilled
    assert all(page in {row.table[0] for row in dispatch.rows} for dispatch in prefills(device))
    assert {len(dispatch.rows) for dispatch in prefills(device)} == {4}


def test_rows_of_one_prompt_are_consecutive_and_cover_all_but_the_last_id():
    device = build()
    prompt = ids(300)
    device.submit(prompt, max_tokens=1)
    device.finish()
    rows = [row for dispatch in prefills(device) for row in dispatch.rows]
    assert tuple(i for row in rows for i in row.ids) == prompt[:-1]
    assert [row.start for row in rows] == list(range(0, 299, CHUNK))


def test_a_scored_prompt_is_prefilled_whole_in_rows_of_its_own_and_then_cached_for_others():
    device = build()
    prompt = ids(100)
    device.submit(prompt, max_tokens=1)
    device.finish()
    scored = device.submit(prompt, max_tokens=1, wants_prompt=True)
    other = device.submit(ids(100, 1), max_tokens=1)
    assert set(device.finish()) == {scored, other}
    assert scored.prompt_logprobs == [-float(token) for token in prompt[1:]]
    assert other.prompt_logprobs == []
    assert device.counts["prefilled"] == 3 * 99
    again = device.submit(ids(100, 2), wants_prompt=True)
    device.finish()
    device.submit(again.request.prompt_ids)
    device.finish()
    assert device.counts["prefilled"] == 4 * 99


# Queues


def test_a_request_too_big_for_now_waits_and_is_not_overtaken_by_its_own_tenants():
    device = build(40)
    first = device.submit(ids(400), max_tokens=100)
    device.step()
    big = device.submit(ids(300, 1), max_tokens=4)
    small = device.submit((7,), max_tokens=4)
    device.step()
    assert reasons(device) == {first.request.request_id: (0, "prefill"), big.request.request_id: (0, "pages"), small.request.request_id: (1, "pages")}
    assert device.finish() == [first, small, big]
    assert device.scheduler.counts.num_preempted == 0


def waits_beside_a_big_one(num_before):
    """Dispatches that a small request takes beside long ones of another tenant, and a big one of a third that comes for nearly the whole pool."""
    device = build(128)
    for number in range(num_before):
        device.submit(ids(20, number), tenant="long", max_tokens=400)
    run_steps(device, 4)
    big = device.submit(ids(1900, 999), tenant="big", max_tokens=8)
    device.step()
    small = device.submit(ids(20, 1000), tenant="small", max_tokens=4)
    return device, big, steps_until(device, lambda finished: small in finished)


@pytest.mark.parametrize("num_before", [1, 8])
def test_a_big_request_holds_up_no_other_tenants_small_one_whether_it_waits_or_is_prefilled(num_before):
    device, big, number = waits_beside_a_big_one(num_before)
    assert (big.turn >= 0) == (num_before == 1)
    assert number <= 3, "one prefill and one decode dispatch, and one between them"
    assert big in device.finish()
    assert big.num_overtaken <= 1


@pytest.mark.parametrize("num_before", [1, 8])
def test_a_big_request_is_overtaken_no_more_than_a_few_times_whoever_comes(num_before):
    """In every dispatch another tenant's small request comes, for ever, and other long ones: by then whatever was active has ended."""
    device, big, _ = waits_beside_a_big_one(num_before)
    for number in range(3000):
        device.submit(ids(20, number), tenant=f"s{number}", max_tokens=4)
        if number % 50 == 0:
            device.submit(ids(20, number), tenant="long", max_tokens=400)
        if big in (device.step() or ()):
            break
    assert big.is_finished
    assert big.num_overtaken <= MAX_OVERTAKEN
    assert number < 400


def test_nobody_overtakes_whose_tenant_would_then_hold_more_for_its_weight_than_that_of_the_one_that_waits():
    device = build(40)
    device.scheduler.set_weight("b", 3.0)
    device.submit(ids(470), tenant="a", max_tokens=100)
    device.step()
    waiting = device.submit(ids(150, 1), tenant="b", max_tokens=4)
    small = [device.submit(ids(20, number), tenant="c", max_tokens=4) for number in (2, 3)]
    device.step()
    assert device.scheduler.pool.num_available >= 3 + 2, "enough for the second as well, with room for the first to grow"
    assert (waiting.turn, [one.turn for one in small]) == (-1, [1, -1])
    assert reasons(device)[small[1].request.request_id] == (0, "pages")
    assert len(device.finish()) == 4


def test_a_tenant_may_have_so_many_waiting_and_no_more():
    device = build(widths=(8,), max_waiting=3)
    for number in range(8):
        device.submit((5, number), tenant="a", max_tokens=100)
        device.step()
    for _ in range(3):
        device.submit((5,), tenant="a")
    with pytest.raises(QueueFullError, match="position 3 of tenant 'a', of which max_waiting = 3"):
        device.submit((5,), tenant="a")
    device.submit((5,), tenant="b")
    assert len(device.finish()) == 12


def test_a_warm_continuation_goes_before_cold_requests_but_not_for_ever():
    device = build(widths=(8,))
    episodes = [device.submit(ids(60, number), episode=f"e{number}", max_tokens=4) for number in range(20)]
    device.finish()
    running = [device.submit((5, number), max_tokens=400) for number in range(8)]
    device.step()
    cold = device.submit(ids(60, 100), max_tokens=4)
    warm = [device.submit((*s.request.prompt_ids, *s.sampled_ids, 7), episode=s.request.episode_id, max_tokens=4) for s in episodes]
    order = [one for one in device.scheduler.sequences() if one not in running]
    assert order == [*warm[:MAX_OVERTAKEN], cold, *warm[MAX_OVERTAKEN:]]
    assert reasons(device)[cold.request.request_id] == (MAX_OVERTAKEN, "lanes")
    for one in running:
        device.scheduler.cancel(one)
    done = device.finish()
    assert done.index(cold) <= MAX_OVERTAKEN + 8


def test_a_cancelled_request_leaves_room_at_once():
    device = build(40)
    big = device.submit(ids(500), max_tokens=4)
    late = device.submit(ids(500, 1), max_tokens=4)
    device.step()
    assert late.turn < 0
    device.scheduler.cancel(big)
    assert device.scheduler.pool.num_held == 0
    device.step()
    assert late.turn >= 0
    device.scheduler.cancel(late)
    assert (device.scheduler.has_work, device.scheduler.plan()) == (False, None)


def test_expired_requests_are_named_once_and_finished_ones_never():
    device = build()
    soon, later, done = (device.submit((5, n), max_tokens=n, deadline_s=at) for n, at in ((90, 10.0), (90, 20.0), (4, 5.0)))
    steps_until(device, lambda finished: done in finished)
    assert device.scheduler.expired(9.9) == []
    assert device.scheduler.expired(10.0) == [soon]
    assert device.scheduler.expired(15.0) == []
    device.scheduler.cancel(soon)
    assert device.scheduler.expired(99.0) == [later]


# Versions


@pytest.mark.parametrize("recomputes", [False, True])
def test_after_a_publish_keys_and_values_are_kept_or_computed_anew(recomputes):
    device = build(runs="a", recomputes=recomputes)
    mine = device.submit(ids(50), run="a", max_tokens=40)
    pinned = device.submit(ids(50), run="a", version=0, max_tokens=40)
    run_steps(device, 4)
    num_sampled = len(mine.sampled_ids)
    assert 0 < num_sampled < 40
    device.slots.advance("a", 1, ("a", 1))
    if recomputes:
        device.scheduler.publish_moved("a")
    assert set(device.finish()) == {mine, pinned}
    assert mine.versions == [0] * num_sampled + [1] * (40 - num_sampled)
    assert (mine.num_mixed, device.counts["prefilled"]) == ((0, 49 + 49 + num_sampled) if recomputes else (40 - num_sampled, 49))
    assert (pinned.versions, pinned.num_mixed) == ([0] * 40, 0)
    device.submit(ids(50), run="a", version=None, max_tokens=1)
    device.finish()
    assert device.counts["prefilled"] == 49 + 49 + (num_sampled if recomputes else 0), "version 1 finds its own pages only"


@pytest.mark.parametrize(("wants_prompt", "every"), [(False, 10), (True, 10), (False, 3)])
def test_a_long_prompt_gets_its_tokens_however_often_there_are_publishes(wants_prompt, every):
    """Its prefill takes 16 dispatches. It keeps the version that it restarts with until it has sampled under it, and then takes the newest."""
    device = build(runs="a", recomputes=True)
    mine = device.submit(ids(2000), run="a", max_tokens=12, wants_prompt=wants_prompt)
    for number in range(1, 200):
        if number % every == 0:
            device.slots.advance("a", number, ("a", number))
            device.scheduler.publish_moved("a")
        if mine in (device.step() or ()):
            break
    assert (mine.is_finished, mine.num_mixed) == (True, 0)
    assert number < 4 * 25
    assert mine.versions == sorted(mine.versions)
    assert [mine.versions.count(version) for version in sorted(set(mine.versions))] == [STEPS] * 3, "each restart comes to a dispatch's tokens"
    assert device.slots.num_known == 1


# Tiles


def test_tiles_hold_one_slot_each():
    device = build(runs="ab")
    for number in range(30):
        device.submit(ids(3, number), run=("", "a", "b")[number % 3], tenant="xy"[number % 2], max_tokens=9)
    device.finish()  # the device checks each tile
    assert all(dispatch.num_lanes <= 16 for dispatch in decodes(device))


def test_a_tile_is_a_lane_where_that_makes_a_dispatch_narrower_or_serves_more():
    device = build(widths=(8, 32), slots=32, runs="abcdefghijkl")
    for name in "abcdef":
        device.submit((5,), run=name, tenant=name, max_tokens=8)
    device.step()
    assert decodes(device)[-1].lanes_per_tile == 1, "six runs in eight lanes"
    for name in "ghijkl":
        device.submit((5,), run=name, tenant=name, max_tokens=8)
    device.step()
    assert (decodes(device)[-1].lanes_per_tile, decodes(device)[-1].num_lanes) == (1, 12), "twelve tiles of eight do not fit"
    device.finish()
    for number in range(9):
        device.submit((5, number), run="a", max_tokens=8)
    device.step()
    assert decodes(device)[-1].lanes_per_tile == 8, "32 lanes either way"


def test_lanes_of_one_prompt_lie_in_one_tile_and_read_it_once():
    device = build(1024, widths=(8, 32), rows=16)
    for member in range(8):
        for prompt in range(3):
            device.submit(ids(300 + 100 * prompt, prompt), tenant="ab"[member % 2], max_tokens=40)
    device.submit(ids(50, 9), max_tokens=40)
    device.finish()
    dispatch = next(dispatch for dispatch in decodes(device) if dispatch.num_lanes == 25)
    assert sorted(tile.num_shared for tile in dispatch.tiles) == [0, 16, 24, 28]


def test_a_shared_prefix_ends_where_the_first_lane_of_its_tile_leaves_it():
    device = build(1024, widths=(8, 32), rows=16)
    stem = ids(400)
    for member in range(4):
        device.submit((*stem[: 150 + 60 * member], *ids(200, member + 1)), max_tokens=40)
    device.finish()
    assert {d.tiles[0].num_shared for d in decodes(device) if d.num_lanes == 4} == {2 * BLOCK_PAGES}


def test_lanes_of_a_deterministic_run_share_no_reads():
    device = build(1024, widths=(8, 32), runs="d", fixed=(32, 4))
    device.scheduler.set_deterministic("d", is_deterministic=True)
    for run in ("d", ""):
        for _ in range(4):
            device.submit(ids(300), run=run, max_tokens=4)
    device.finish()
    shared = {
        (device.in_slot[tile.slot][0], tile.num_shared > 0) for dispatch in decodes(device) for tile in dispatch.tiles if len(tile.sequences) == 4
    }
    assert shared == {("d", False), ("", True)}


def test_of_one_tenant_prompts_with_scores_and_without_take_turns():
    device = build(1024, rows=4)
    device.submit(ids(4000), wants_prompt=True, max_tokens=4)
    run_steps(device, 3)
    number = len(device.dispatches)
    late = [device.submit(ids(200 + n, n), max_tokens=4) for n in range(2)]
    assert steps_until(device, lambda finished: late[0] in finished or late[1] in finished) < 20
    kinds = [bool(dispatch.rows[0].targets) for dispatch in prefills(device) if dispatch in device.dispatches[number:]]
    assert kinds[:3] == [False, True, False]


def test_no_lanes_share_reads_where_that_would_change_bits():
    device = build(1024, widths=(8, 32), rows=16, shares_prefixes=False)
    for _ in range(8):
        device.submit(ids(300), max_tokens=4)
    device.finish()
    assert {tile.num_shared for dispatch in decodes(device) for tile in dispatch.tiles} == {0}


def test_who_was_served_while_nobody_else_asked_owes_nobody_for_it():
    """Tenant a works for long, and is idle for a moment, in which b comes with a flood."""

    def dispatches_until_a_has_a_token(num_before):
        device = build(2048, runs="ab")
        for number in range(num_before):
            device.submit(ids(20, number), tenant="a", run="a", max_tokens=100)
        device.finish()
        for number in range(64):
            device.submit(ids(700, 1000 + number), tenant="b", run="b", max_tokens=4)
        device.step()
        late = device.submit(ids(20, 10**6), tenant="a", run="a")
        return steps_until(device, lambda _: late.sampled_ids)

    assert dispatches_until_a_has_a_token(100) <= dispatches_until_a_has_a_token(0) + 1


def test_a_tenant_that_is_idle_and_owes_nothing_is_forgotten():
    """Tenants come one after another, and two at a time; what they owe each other stays with those that are kept."""
    device = build(256)
    for number in range(2000):
        device.submit(ids(20, number), tenant=f"t{number}")
        if number % 2:
            device.finish()
    tenants = device.scheduler._tenants
    assert len(list(tenants)) < 4 * MAX_IDLE
    tenants["weighted"].weight = 2.0
    for number in range(500):
        device.submit(ids(20, number), tenant=f"u{number}")
        device.finish()
    assert tenants["weighted"].weight == 2.0


def test_nobody_gives_way_for_pages_that_another_holds_as_well():
    """A pinned request and an episode, each by a name of its own, hold the same pages: the episode's going would free few of them."""
    device = build(64, runs="abcd")
    prompt = ids(321)
    device.submit(prompt, run="a", tenant="t", episode="e", max_tokens=1)
    device.finish()
    pinned = device.submit(prompt, run="a", tenant="pinned", version=0, max_tokens=60)
    device.slots.advance("a", 1, ("a", 1))
    other = device.submit(ids(300, 1), run="b", tenant="t", max_tokens=60)
    for _ in range(8):
        device.step()
    episode = device.submit((*prompt, 7), run="a", tenant="t", episode="e", max_tokens=60)
    device.step()
    assert [node.content for node in episode.chain] == [node.content for node in pinned.chain]
    assert not {*episode.chain} & {*pinned.chain}
    device.submit(ids(200, 2), run="c", tenant="new", max_tokens=60)
    before = len(episode.sampled_ids)
    for _ in range(6):
        device.step()
    assert not pinned.is_finished
    assert not other.is_finished
    assert device.scheduler.counts.num_preempted == 0
    assert len(episode.sampled_ids) > before + 12
    device.finish()
