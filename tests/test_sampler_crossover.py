"""Adapters that come and go, requests that are cut off or wait: each token is its own version's, and nobody else's change by a bit."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from naive_sampler import SIZES
from sampler_builders import drive, engine, prompt, request, run
from test_sampler_adapters import constant_adapter, constant_base

from noria.errors import QueueFullError, RequestCancelledError


def wider(weights, rank):
    """The same adapter, in a larger class of ranks."""

    def pad(leaf, axis):
        return np.pad(leaf, [(0, rank - leaf.shape[axis] if index == axis % leaf.ndim else 0) for index in range(leaf.ndim)])

    return {"a": {name: pad(leaf, -1) for name, leaf in weights["a"].items()}, "b": {name: pad(leaf, -2) for name, leaf in weights["b"].items()}}


class Tenants:
    """Four tenants whose adapters each give one token only, another one with every version; two slots. Which token is which version's is known."""

    def __init__(self, seed):
        base, self.params = constant_base()
        self.sampler = engine(base=base, host_mib=1, **SIZES)
        self.rng, self.tokens, self.published = random.Random(seed), {}, set()

    def publish(self, run_id):
        version = len(self.tokens)
        token = self.tokens[run_id, version] = 10 + 37 * version % 240
        weights = constant_adapter(self.params, token)
        self.sampler.publish(run_id, version, weights if run_id in "ab" else wider(weights, 12), 1.0)
        self.published.add(run_id)

    async def ask(self, run_id, number):
        rng, pinned = self.rng, self.rng.random() < 0.2
        version = self.sampler.newest_version(run_id) if pinned else None
        ids, tokens = prompt(rng.randrange(1, 60), seed=number % 7), rng.randrange(1, 40)
        episode = rng.choice(("", f"{run_id}{number % 5}"))
        asked = request(ids, run=run_id, tenant=run_id, version=version, episode=episode, max_tokens=tokens, seed=number)
        if rng.random() < 0.5:
            return run_id, await self.sampler.sample(asked)
        items = [item async for item in self.sampler.stream(asked)]
        completion = items[-1].completion
        assert completion.sampled_ids == tuple(token for item in items for token in item.sampled_ids)
        assert completion.versions == tuple(version for item in items for version in item.versions)
        return run_id, completion

    async def play(self, number_of_requests):
        rng, tasks = self.rng, []
        for number in range(number_of_requests):
            run_id = rng.choice("abcd")
            if run_id in self.published and rng.random() < 0.05:
                self.sampler.retire(run_id)
                self.published.remove(run_id)
            if run_id not in self.published or rng.random() < 0.3:
                self.publish(run_id)
            tasks.append(asyncio.ensure_future(self.ask(run_id, number)))
            await asyncio.sleep(0)
            if rng.random() < 0.05:
                rng.choice(tasks).cancel()
            for _ in range(rng.randrange(3)):
                self.sampler.step()
        while self.sampler.step():
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks, return_exceptions=True)


def test_four_tenants_in_two_slots_get_the_tokens_of_their_own_versions_only():
    """Case 92, stop-ship: adapters with constant outputs, of two classes of ranks, added, replaced and evicted during decoding. Cases 59 and 64: each
    token names the version that made it, and a version lives as long as its last request."""
    tenants = Tenants(seed=0)
    outcomes = asyncio.run(tenants.play(250))
    cut = [one for one in outcomes if isinstance(one, RequestCancelledError | asyncio.CancelledError)]
    finished = [one for one in outcomes if not isinstance(one, BaseException)]
    assert [one for one in outcomes if isinstance(one, BaseException) and one not in cut] == []
    assert len(finished) > 100
    for run_id, completion in finished:
        assert list(completion.sampled_ids) == [tenants.tokens[run_id, version] for version in completion.versions]
    assert sum(len(set(completion.versions)) > 1 for _, completion in finished) > 10, "streams that saw a publish"
    assert tenants.sampler.counts.num_slot_writes > 60
    assert (tenants.sampler.num_versions, tenants.sampler.num_held_pages) == (len(tenants.published), 0)


def test_a_request_cut_off_in_any_step_changes_no_bit_of_those_beside_it():
    """One of a group of three, cancelled or its stream closed, while it waits, is prefilled with the others' pages, or decodes."""
    asked = [request(prompt(190), max_tokens=24, seed=3, sample_index=n) for n in range(3)] + [request(prompt(33, seed=1), max_tokens=40, seed=4)]
    expected = run(engine(**SIZES), *asked)
    sampler = engine(**SIZES)

    async def cut_off(moment, is_stream):
        first, *others = (replace(one, request_id=f"{one.request_id}/{moment}/{is_stream}") for one in asked)
        kept = [asyncio.ensure_future(sampler.sample(one)) for one in others]
        stream = sampler.stream(first)
        task = asyncio.ensure_future(anext(stream) if is_stream else sampler.sample(first))
        await asyncio.sleep(0)
        for _ in range(moment):
            sampler.step()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await stream.aclose()
        return await drive(sampler, *kept)

    for moment in range(14):
        for is_stream in (False, True):
            assert asyncio.run(cut_off(moment, is_stream)) == expected[1:], (moment, is_stream)
            while sampler.step():
                pass
            assert (sampler.num_held_pages, sampler.waiting()) == (0, [])


def test_a_queue_says_who_waits_for_what_at_which_position_and_when_it_is_full():
    sampler = engine(max_waiting=5, **SIZES)

    async def main():
        running = []
        while sum(one.reason == "decoding" for one in sampler.waiting()) < 16:
            asked = [request((3 + len(running) + n,), max_tokens=44, tenant="a", temperature=0.0) for n in range(4)]
            running += [asyncio.ensure_future(sampler.sample(one)) for one in asked]
            await asyncio.sleep(0)
            sampler.step()
        queued = [request(prompt(9, seed=n), max_tokens=4, tenant="a") for n in range(5)]
        tasks = [asyncio.ensure_future(sampler.sample(one)) for one in queued]
        await asyncio.sleep(0)
        sampler.step()
        waits = {one.request_id: (one.tenant, one.position, one.reason) for one in sampler.waiting()}
        assert [waits[one.request_id] for one in queued] == [("a", n, "lanes") for n in range(5)]
        with pytest.raises(QueueFullError, match="position 5 of tenant 'a', of which max_waiting = 5"):
            await drive(sampler, sampler.sample(request(tenant="a")))
        tasks[0].cancel()
        await asyncio.sleep(0)
        sampler.step()
        waits = {one.request_id: one.position for one in sampler.waiting()}
        assert [waits[one.request_id] for one in queued[1:]] == [0, 1, 2, 3]
        (other,) = await drive(sampler, sampler.sample(request(tenant="b", max_tokens=2)))
        assert len(other.sampled_ids) == 2
        late = asyncio.ensure_future(sampler.sample(request(tenant="a", max_tokens=2)))
        await asyncio.sleep(0)
        for task in running:
            task.cancel()
        done = await drive(sampler, asyncio.gather(*tasks[1:], late))
        await asyncio.gather(*running, tasks[0], return_exceptions=True)
        assert len(done[0]) == 5

    asyncio.run(main())
    assert (sampler.waiting(), sampler.num_held_pages) == ([], 0)
