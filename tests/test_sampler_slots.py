"""Slots as a cache of adapter versions: who is kept, who is brought where, and what every dispatch finds in the slot it reads."""

import asyncio
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_builders import adapter, drive, engine, prompt, request, run

from noria.errors import StateConflictError, UnknownVersionError
from noria.model.lora import checksum
from noria.sampler.slots import BASE_RUN, SlotTable


class Device:
    """Slots as a list, and a naive rule of which versions anybody can still ask for."""

    def __init__(self, num_slots, rng):
        self.table, self.rng = SlotTable(num_slots), rng
        self.slots = ["base"] + [None] * (num_slots - 1)
        self.newest, self.users = {}, Counter()

    @property
    def kept(self):
        return sorted({key for key, num in self.users.items() if num} | set(self.newest.items()))

    def publish_or_retire(self, run_id):
        if self.rng.random() < 0.1 and run_id in self.newest and not any(num for (run, _), num in self.users.items() if run == run_id):
            self.table.retire(run_id)
            del self.newest[run_id]
        else:
            self.newest[run_id] = version = self.newest.get(run_id, -1) + 1
            self.table.advance(run_id, version, f"{run_id}{version}")

    def acquire(self):
        for key in self.kept:
            self.table.acquire(*key)
            self.users[key] += 1

    def release_some(self):
        for key in [key for key, num in self.users.items() if num and self.rng.random() < 0.5]:
            self.table.release(*key)
            self.users[key] -= 1

    def plan(self):
        """Slots of the versions that one plan asks for, by version."""
        planned = {}
        for key in [*self.rng.sample(self.kept, self.rng.randrange(len(self.kept) + 1)), (BASE_RUN, 0)]:
            if self.table.bring(*key):
                planned[key] = self.table.slot(*key)
            else:
                assert len(planned) == len(self.slots) - 1, "only a plan that needs every slot leaves one out"
        return planned

    def write(self):
        for slot, run_id, contents in self.table.take_writes():
            assert contents.startswith(run_id)
            self.slots[slot] = contents


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_whatever_comes_and_goes_a_planned_slot_holds_the_version_that_was_asked_for(seed, num_slots):
    rng = random.Random(seed)
    device = Device(num_slots, rng)
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            device.publish_or_retire(rng.choice("abcd"))
        assert device.table.num_known == len(device.kept)
        if rng.random() < 0.5:
            device.acquire()
        planned = device.plan()
        device.release_some()  # before the dispatch has run, as a prefill does
        device.write()
        for (run_id, version), slot in planned.items():
            assert device.slots[slot] == (f"{run_id}{version}" if run_id else "base")
        assert len(set(planned.values())) == len(planned)


def test_slots_are_taken_from_the_version_that_nobody_asked_for_longest():
    slots = SlotTable(3)
    for run_id in "abc":
        slots.advance(run_id, 0)
    for run_id in "abab":
        assert slots.bring(run_id, 0)
        slots.take_writes()
    assert slots.bring("c", 0)
    assert slots.bring("b", 0)
    assert not slots.bring("a", 0), "both slots are of this plan"
    assert {slots.slot("b", 0), slots.slot("c", 0)} == {1, 2}
    (write,) = slots.take_writes()
    assert (write.run_id, write.slot) == ("c", slots.slot("c", 0)), "b has stayed where it was"
    assert slots.bring("a", 0)


def test_a_version_that_is_forgotten_in_its_last_plan_is_still_written_and_its_slot_nobody_elses():
    """A prefill lets go of its version when its last row is planned: the dispatch reads the slot after that."""
    slots = SlotTable(2)
    slots.advance("a", 0, "a0")
    slots.acquire("a", 0)
    slots.advance("a", 1, "a1")
    assert slots.bring("a", 0)
    slot = slots.slot("a", 0)
    slots.release("a", 0)
    with pytest.raises(UnknownVersionError):
        slots.acquire("a", 0)
    assert not slots.bring("a", 1)
    assert slots.take_writes() == [(slot, "a", "a0")]
    assert slots.bring("a", 1)
    assert slots.take_writes() == [(slot, "a", "a1")]


def test_versions_never_go_back_and_a_pinned_one_keeps_the_name_of_its_retired_run():
    slots = SlotTable(2)
    slots.advance("a", 3)
    for version in (3, 2, -1):
        with pytest.raises(StateConflictError, match="never goes back"):
            slots.advance("a", version)
    slots.acquire("a", 3)
    slots.retire("a")
    with pytest.raises(UnknownVersionError, match="no published version"):
        slots.newest("a")
    with pytest.raises(StateConflictError, match=r"pinned versions \[3\]"):
        slots.advance("a", 0)
    slots.release("a", 3)
    assert (slots.num_known, slots.num_free) == (0, 1)


def test_more_runs_than_slots_each_stream_shows_its_own_adapter_only():
    """Case 92: two slots, five tenants, adapters added and evicted during decoding; each as if it were alone."""
    alone = {}
    for n in range(5):
        sampler = engine(num_slots=8)
        sampler.publish(f"run-{n}", 0, adapter(n), 1.0)
        (alone[n],) = run(sampler, request(prompt(20), run=f"run-{n}", max_tokens=40, seed=7))
    assert len({completion.sampled_ids for completion in alone.values()}) == 5
    sampler = engine(num_slots=2)
    for n in range(5):
        sampler.publish(f"run-{n}", 0, adapter(n), 1.0)

    def publish(step):
        sampler.publish("busy", step, adapter(step % 7 + 10), 1.0)
        assert sampler.checksum("busy", step) == checksum(adapter(step % 7 + 10))

    asked = [request(prompt(20), run=f"run-{n}", tenant=f"t{n}", max_tokens=40, seed=7) for n in range(5)]
    beside = run(sampler, *asked, between=publish)
    for n, completion in enumerate(beside):
        assert completion.sampled_ids == alone[n].sampled_ids
        np.testing.assert_allclose(completion.behavior_logprobs, alone[n].behavior_logprobs, atol=1e-5)
    assert sampler.counts.num_slot_writes > 50
    assert (sampler.num_versions, sampler.num_held_pages) == (6, 0)


def test_a_version_without_a_slot_is_in_one_within_the_next_dispatch():
    sampler = engine(num_slots=2)
    for n in range(3):
        sampler.publish(f"run-{n}", 0, adapter(n), 1.0)

    async def first_step(run_id):
        writes = sampler.counts.num_slot_writes
        task = asyncio.ensure_future(sampler.sample(request((5,), run=run_id, max_tokens=4)))
        await asyncio.sleep(0)
        sampler.step()
        assert (sampler.counts.num_slot_writes - writes, len((await drive(sampler, task))[0].sampled_ids)) == (1, 4)

    for n in (0, 1, 2, 0):
        decodes = sampler.counts.num_decodes
        asyncio.run(first_step(f"run-{n}"))
        assert sampler.counts.num_decodes == decodes + 1


def test_versions_nobody_can_ask_for_any_more_are_dropped():
    sampler = engine(num_slots=2)
    for version in range(50):
        sampler.publish("a", version, adapter(version % 2), 1.0)
        if version in (10, 20):
            sampler.pin("a", version)
    assert sampler.num_versions == 3
    (pinned,) = run(sampler, request(run="a", version=10, max_tokens=8))
    assert set(pinned.versions) == {10}
    for version in (10, 20):
        sampler.unpin("a", version)
    sampler.retire("a")
    assert (sampler.num_versions, sampler.num_free_slots) == (0, 1)


def test_nobody_publishes_over_the_base_or_retires_it():
    sampler = engine()
    (before,) = run(sampler, request())
    with pytest.raises(StateConflictError, match="the plain base"):
        sampler.publish(BASE_RUN, 1, adapter(1), 1.0)
    sampler.retire(BASE_RUN)
    assert run(sampler, request()) == [before]
    assert sampler.num_versions == 0
