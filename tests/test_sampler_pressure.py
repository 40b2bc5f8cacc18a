"""When pages run short: whatever comes and goes, everything ends, every lane reads what its ids left, and no page is lost or has two writers."""

import random
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sampler_simulation import build

from noria.sampler.pages import PAGE
from noria.sampler.sequence import DecodeDispatch, PrefillDispatch

RUNS = ("", "a", "b", "d")


class Pressure(RuleBasedStateMachine):
    """Requests of four runs, one of them deterministic, three tenants and a few episodes, in a pool for one or two of them."""

    @initialize(
        num_pages=st.sampled_from((12, 16, 24, 40)),
        places=st.sampled_from((0, 3, 10, 100)),
        max_moves=st.sampled_from((1, 3, 64)),
        widths=st.sampled_from(((8,), (16,), (8, 32))),
        rows=st.sampled_from((2, 4)),
        slots=st.sampled_from((2, 3, 8)),
        recomputes=st.booleans(),
        vocab=st.sampled_from((5, 1000)),
        seed=st.integers(0, 2**32),
    )
    def start(self, *, num_pages, places, max_moves, widths, rows, slots, recomputes, vocab, seed):
        sizes = {"widths": widths, "rows": rows, "slots": slots, "fixed": (8, 2)}
        self.device = build(num_pages, places=places, max_moves=max_moves, runs=RUNS[1:], seed=seed, recomputes=recomputes, **sizes)
        self.device.vocab = vocab
        self.scheduler, self.recomputes, self.rng = self.device.scheduler, recomputes, random.Random(seed)
        self.scheduler.set_deterministic("d", is_deterministic=True)
        self.most = (num_pages - 3) * PAGE
        self.live, self.history, self.newest = [], {}, {"a": 0, "b": 0}

    @rule(
        run=st.sampled_from(RUNS),
        tenant=st.sampled_from("tuv"),
        episode=st.sampled_from(("", "e1", "e2")),
        share=st.floats(0, 1),
        max_tokens=st.integers(1, 200),
        is_pinned=st.booleans(),
        wants_prompt=st.sampled_from((False, False, False, True)),
        number=st.integers(1, 4),
    )
    def submit(self, *, run, tenant, episode, share, max_tokens, is_pinned, wants_prompt, number):
        max_tokens = min(max_tokens, self.most // 2)
        length = max(1, int(share * (self.most - max_tokens)))
        ids = (self.history.get((run, episode), ()) + tuple(self.rng.randrange(3, 5) for _ in range(length)))[-length:]
        version = self.newest.get(run) if is_pinned else None
        for _ in range(number):
            self.live.append(
                self.device.submit(ids, run=run, tenant=tenant, episode=episode, version=version, max_tokens=max_tokens, wants_prompt=wants_prompt)
            )

    @rule(run=st.sampled_from("ab"))
    def publish(self, run):
        self.newest[run] += 1
        self.device.slots.advance(run, self.newest[run], (run, self.newest[run]))
        if self.recomputes:
            self.scheduler.publish_moved(run)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.scheduler.cancel(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @rule(number=st.integers(1, 30))
    def step(self, number):
        for _ in range(number):
            deterministic = {s: s.table for s in self.live if s.request.run_id == "d" and s.table}
            for sequence in self.device.step() or []:
                self.live.remove(sequence)
                self.check_finished(sequence)
            assert all(s.table is table for s, table in deterministic.items() if s in self.live), "all pages at admission, and never preempted"

    def check_finished(self, sequence):
        request = sequence.request
        assert len(sequence.sampled_ids) == request.params.max_tokens
        assert sequence.prompt_logprobs == [-float(token) for token in request.prompt_ids[1:] if request.wants_prompt]
        assert not (self.recomputes and sequence.num_mixed)
        self.history[request.run_id, request.episode_id] = request.prompt_ids + tuple(sequence.sampled_ids)

    @invariant()
    def pages_balance(self):
        pool = self.scheduler.pool
        active = [sequence for sequence in self.live if sequence.table]
        own = [page for sequence in active for page in sequence.own_pages]
        shared = {node.page for sequence in active for node in sequence.chain}
        assert len(own) == len(set(own))
        assert not shared & set(own)
        assert 0 not in shared | set(own)
        assert len(shared | set(own)) <= pool.num_held < pool.num_pages
        assert len(self.scheduler.waiting()) == len(self.live)

    def teardown(self):
        if not hasattr(self, "device"):
            return
        for _ in range(20_000):
            if (finished := self.device.step()) is None:
                break
            for sequence in finished:
                self.live.remove(sequence)
                self.check_finished(sequence)
        pool = self.scheduler.pool
        assert (self.live, pool.num_held, self.scheduler.has_work) == ([], 0, False)
        assert self.device.slots.num_known == 3, "prefills and pins have let go of every version but the newest"
        for run in RUNS:
            pool.purge(run)
        assert sorted(pool.take(pool.num_pages - 1)) == list(range(1, pool.num_pages))


Pressure.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_whatever_comes_and_goes_everything_ends = Pressure.TestCase


def episodes(num_pages, places, *, number=16, turns=3, context=16_384, seed=0):
    """Episodes of several turns with pauses between them, all at once: the device, and how many positions a pool for all of them would prefill."""
    device, rng = build(num_pages, places=places, widths=(8, 32, 64), rows=16, seed=seed), random.Random(seed)
    length = context // turns - 32
    ids = [tuple(rng.randrange(3, 1000) for _ in range(length)) for _ in range(number)]
    turn, awake, live, now = [0] * number, {e: 0 for e in range(number)}, {}, 0
    while awake or live:
        for e in [e for e, at in awake.items() if at <= now]:
            del awake[e]
            live[device.submit(ids[e], episode=f"e{e}", max_tokens=32)] = e
        now += 1
        for sequence in (device.step() or []) if live else []:
            e = live.pop(sequence)
            turn[e] += 1
            if turn[e] < turns:
                ids[e] = sequence.request.prompt_ids + tuple(sequence.sampled_ids) + tuple(rng.randrange(3, 1000) for _ in range(length))
                awake[e] = now + rng.randrange(100)
    return device, sum(len(i) - 1 - 31 * (turns - 1) for i in ids) - number * (turns - 1)


@pytest.mark.parametrize(("places", "most"), [(16_384, 1.0), (0, 2.5)])
def test_sixteen_episodes_of_16k_end_in_a_quarter_of_the_pages_they_need(places, most):
    """With room for them in host memory nothing is computed twice; without, no more than each turn from its beginning."""
    device, least = episodes(4096, places)
    counts = device.scheduler.pool.counts
    assert device.counts["prefilled"] <= most * least
    assert (counts.num_stored, counts.num_loaded) == (device.counts["stored"], device.counts["loaded"])
    assert (counts.num_stored > 0) == (places > 0)
    assert counts.num_dropped == 0 or places < 16_384


def test_a_group_that_outgrows_the_pool_is_preempted_little_and_goes_on_where_it_was():
    device = build(60, widths=(8, 32))
    prompt = tuple(range(3, 203))
    mine = [device.submit(prompt, max_tokens=400) for _ in range(16)]
    assert set(device.finish()) == set(mine)
    counts = device.scheduler.counts
    assert 0 < counts.num_preempted < 40
    assert counts.num_recomputed < sum(len(s.sampled_ids) for s in mine)
    assert device.counts["prefilled"] == 199 + counts.num_recomputed


def test_preempted_requests_find_in_host_memory_what_they_had():
    device = build(60, places=400, widths=(8, 32))
    mine = [device.submit(tuple(range(3, 203)), max_tokens=400) for _ in range(16)]
    assert set(device.finish()) == set(mine)
    assert device.scheduler.counts.num_preempted > 0
    assert (device.counts["prefilled"], device.scheduler.counts.num_recomputed) == (199, 0)


def test_between_two_decode_dispatches_lies_at_most_one_prefill_whatever_is_preempted():
    device, rng = build(100, widths=(8, 32), rows=4), random.Random(0)
    for number in range(60):
        device.submit(tuple(rng.randrange(3, 9) for _ in range(rng.randrange(1, 600))), tenant="ab"[number % 2], max_tokens=rng.randrange(1, 300))
    ready: set[str] = set()
    while device.step() is not None:
        ready_before, ready = ready, {one.request_id for one in device.scheduler.waiting() if one.reason == "decoding"}
        if len(device.dispatches) > 1 and not any(isinstance(dispatch, DecodeDispatch) for dispatch in device.dispatches[-2:]):
            assert not ready_before & ready, "who could decode waits for one prefill at most, or gives its pages to others"
    assert device.scheduler.counts.num_preempted > 0


def test_an_episode_that_comes_back_is_loaded_piece_by_piece_while_others_decode():
    device, rng = build(64, places=64, max_moves=4, rows=16), random.Random(0)
    first = device.submit([rng.randrange(3, 1000) for _ in range(640)], episode="e", max_tokens=8)
    device.finish()
    device.submit([rng.randrange(3, 1000) for _ in range(500)], episode="f", max_tokens=400)
    device.finish()
    other = device.submit((5, 6), max_tokens=320)
    device.step()
    number, prefilled = len(device.dispatches), device.counts["prefilled"]
    back = device.submit((*first.request.prompt_ids, *first.sampled_ids, 7, 8), episode="e", max_tokens=8)
    while back not in (device.step() or ()):
        pass
    moves = device.dispatches[number:]
    assert sum(len(dispatch.loads) for dispatch in moves) > 4 * 5
    assert device.counts["prefilled"] - prefilled < PAGE
    lanes = [isinstance(dispatch, DecodeDispatch) and other in [s for tile in dispatch.tiles for s in tile.sequences] for dispatch in moves]
    assert all(now or then for now, then in pairwise(lanes)), "no two dispatches in a row without the other's lane"


def test_pages_move_when_nobody_has_anything_else_to_do():
    device = build(64, places=64, max_moves=1, rows=16)
    first = device.submit(range(3, 703), episode="e", max_tokens=8)
    device.finish()
    device.submit(range(1000, 1900), max_tokens=8)
    device.finish()
    back = device.submit((*first.request.prompt_ids, *first.sampled_ids, 7), episode="e", max_tokens=8)
    number = len(device.dispatches)
    device.step()
    assert [(one.request_id, one.reason) for one in device.scheduler.waiting()] == [(back.request.request_id, "pages")]
    assert device.finish() == [back]
    moves = [dispatch for dispatch in device.dispatches[number:] if isinstance(dispatch, PrefillDispatch) and not dispatch.rows]
    assert len(moves) > 30
    assert all(len(dispatch.stores) + len(dispatch.loads) in (1, 2) for dispatch in moves)
