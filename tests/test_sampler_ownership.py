"""Who owns which page and which place in host memory, counted from outside after every step of any interleaving. Tables are checked, no arrays."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_simulation import STEPS, build

from noria.sampler.pages import PAGE
from noria.sampler.sequence import CHUNK, PrefillDispatch

RUNS = ("", "a", "b", "d")


class Watch:
    """Steps a simulated device, whose every read is checked there, and checks who writes where."""

    def __init__(self, seed, num_pages, places, *, recomputes=False):
        self.rng, self.places = random.Random(seed), places
        self.device = build(num_pages, places=places, widths=(8, 16), slots=3, runs=RUNS[1:], seed=seed, fixed=(8, 2), recomputes=recomputes)
        self.device.vocab = 6
        self.scheduler, self.recomputes = self.device.scheduler, recomputes
        self.scheduler.set_deterministic("d", is_deterministic=True)
        self.live, self.newest, self.most = [], Counter(), (num_pages - 3) * PAGE

    def submit(self):
        rng, run = self.rng, self.rng.choice(RUNS)
        max_tokens = min(rng.randrange(1, 120), self.most // 2)
        ids = [rng.randrange(3, 5) for _ in range(rng.randrange(1, self.most - max_tokens))]
        version = self.newest[run] if rng.random() < 0.2 else None
        options = {"run": run, "tenant": rng.choice("tuv"), "episode": rng.choice(("", "e1", "e2")), "version": version}
        scores = {"wants_prompt": rng.random() < 0.2}
        self.live += [self.device.submit(ids, max_tokens=max_tokens, **options, **scores) for _ in range(rng.choice((1, 1, 4)))]

    def publish(self):
        run = self.rng.choice("ab")
        self.newest[run] += 1
        self.device.slots.advance(run, self.newest[run], (run, self.newest[run]))
        if self.recomputes:
            self.scheduler.publish_moved(run)

    def cancel(self):
        if self.live:
            self.scheduler.cancel(self.live.pop(self.rng.randrange(len(self.live))))

    def step(self):
        number = len(self.device.dispatches)
        for sequence in self.device.step() or []:
            self.live.remove(sequence)
        if len(self.device.dispatches) > number:
            self.check_writers(self.device.dispatches[-1])

    def check_writers(self, dispatch):
        """Nobody else holds what a lane writes; what is moved or copied to has one writer; rows of one prefill may share a page, not a position."""
        targets = [copy.target for copy in dispatch.copies] + [move.page for move in dispatch.loads]
        assert len(targets) == len(set(targets))
        assert not {copy.source for copy in dispatch.copies} & {copy.target for copy in dispatch.copies}
        assert 0 not in targets
        if isinstance(dispatch, PrefillDispatch):
            written = [(row.table[p // PAGE], p % PAGE) for row in dispatch.rows for p in range(row.start, row.start + len(row.ids))]
            assert len(written) == len(set(written))
            assert all(len(row.ids) <= CHUNK for row in dispatch.rows)
            return
        for sequence in (sequence for tile in dispatch.tiles for sequence in tile.sequences if sequence in self.live):
            position = sequence.position - 1  # the last that this dispatch wrote
            page = sequence.table[position // PAGE]
            assert page in sequence.own_pages
            assert not any(page in other.table for other in self.live if other is not sequence)
            assert len(sequence.sampled_ids) >= min(STEPS, sequence.request.params.max_tokens) or sequence.is_finished

    def check_counts(self):
        """The pool holds exactly what requests and prefills hold; every other page is free or cached, and every place is free or known."""
        pool = self.scheduler.pool
        held = {page for sequence in self.live for page in sequence.table}
        held |= {sequence.source.page for sequence in self.live if sequence.source is not None}
        held |= {prefill.source.page for prefill in self.scheduler._prefills._prefills if prefill.source is not None}
        assert pool.num_held == len(held)
        assert pool.num_available == pool.num_pages - 1 - len(held)
        stored = [content for content in _contents(pool) if content.place is not None]
        assert len({content.place for content in stored}) == len(stored)
        assert len(stored) + len(pool._places._free) == self.places
        pages = [content.page for content in _contents(pool) if content.page]
        assert len(pages) == len(set(pages))

    def finish(self):
        for sequence in self.device.finish():
            self.live.remove(sequence)
        pool = self.scheduler.pool
        assert (self.live, pool.num_held, self.scheduler.has_work) == ([], 0, False)
        self.check_counts()
        for run in RUNS:
            pool.purge(run)
        assert len(pool._places._free) == self.places
        assert not pool._roots
        assert not pool._namespace_of
        assert sorted(pool.take(pool.num_pages - 1)) == list(range(1, pool.num_pages))


def _contents(pool):
    """What cached nodes stand for, each once."""
    nodes = list(pool._roots.values())
    for node in nodes:  # grows while it is read
        nodes.extend(node.children.values())
    return {id(node.content): node.content for node in nodes if node.parent is not None}.values()


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from((10, 16, 30, 60)), st.sampled_from((0, 4, 40, 300)), st.booleans())
def test_after_any_interleaving_every_page_and_place_is_counted_once_and_all_come_back(seed, num_pages, places, recomputes):
    watch = Watch(seed, num_pages, places, recomputes=recomputes)
    for _ in range(120):
        watch.rng.choices((watch.submit, watch.cancel, watch.publish, watch.step), (2, 1, 0.5, 8))[0]()
        watch.check_counts()
    watch.finish()


@pytest.mark.parametrize("moment", range(0, 40, 4))
def test_a_request_cancelled_in_any_step_frees_all_it_had_and_stops_no_other(moment):
    """Waiting, partly prefilled, waiting for another's prefill, decoding, preempted: whichever of eight it is, the other seven end."""
    for number in range(8):
        watch = Watch(number, 24, 10)
        prompt = [3 + n % 2 for n in range(150)]
        options = {"tenant": "tu"[number % 2], "max_tokens": 60}
        watch.live = [watch.device.submit(prompt[: 150 - 40 * (n % 2)], episode=f"e{n}" if n % 3 else "", **options) for n in range(8)]
        for _ in range(moment):
            watch.step()
            watch.check_counts()
        if len(watch.live) > number:
            watch.scheduler.cancel(watch.live.pop(number))
        watch.check_counts()
        watch.finish()


@pytest.mark.parametrize("episode", ["", "e"])
def test_what_is_cached_never_hangs_below_a_page_that_may_be_given_up(episode):
    """A scored prompt, prefilled apart, ends while another request's prefill of the same prompt has not begun; then that request is cancelled."""
    watch = Watch(0, 60, 4)
    prompt = [3 + n % 2 for n in range(4 * PAGE + 1)]
    scored = watch.device.submit(prompt, wants_prompt=True, max_tokens=4, episode=episode)
    plain = watch.device.submit(prompt * 3, max_tokens=4, episode=episode)
    watch.live = [scored, plain]
    while scored in watch.live:
        watch.step()
        watch.check_counts()
    assert not plain.chain[3].is_filled
    watch.live.remove(plain)
    watch.scheduler.cancel(plain)
    watch.check_counts()
    again = watch.device.submit(prompt * 3, max_tokens=4, episode=episode)
    watch.live = [again]
    watch.finish()
