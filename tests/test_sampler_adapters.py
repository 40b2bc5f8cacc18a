"""Many runs' adapters on one base: each token by its own run's version, whatever is published, evicted or broken meanwhile."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from sampler_builders import RANK, adapter, drive, engine, merged, prompt, reference_logprobs, request, run, tiny

from noria.errors import InvalidRequestError, RequestCancelledError, RunFailedError, StateConflictError, UnknownVersionError
from noria.model.lora import HEAD, VALUE, checksum, module_sizes
from noria.model.placement import place
from noria.sampler.runner import Shapes


def test_logprobs_are_those_of_merged_weights():
    sampler = engine()
    for number in range(3):
        sampler.publish(f"run{number}", 0, adapter(number), 0.25 * (number + 1))
    requests = [request(prompt(40, seed=n), run=f"run{n % 3}", max_tokens=16, seed=n) for n in range(9)]
    for n, (asked, completion) in enumerate(zip(requests, run(sampler, *requests), strict=True)):
        weights = merged(tiny()[1], adapter(n % 3), 0.25 * (n % 3 + 1))
        np.testing.assert_allclose(completion.behavior_logprobs, reference_logprobs(weights, asked.prompt_ids, completion, 1.0), atol=1e-4)


TOPS = Shapes(lanes=(16,), rows=(4,), tops=(HEAD, VALUE))


def test_an_adapted_unembedding_samples_as_merged_weights_beside_runs_without_one():
    """Runs of other widths too: a slot has one width, narrower adapters are padded when they are published."""
    sampler = engine(shapes=TOPS)
    weights = {
        "both": adapter(0, tops=(HEAD,)),
        "critic": adapter(1, tops=(HEAD, VALUE)),
        "plain": adapter(2),
        "narrow": adapter(3, rank=2, tops=(HEAD,)),
    }
    for run_id, each in weights.items():
        sampler.publish(run_id, 0, each, 0.5)
    asked = [request(prompt(40, seed=n), run=run_id, max_tokens=10, seed=n, temperature=1.3) for n, run_id in enumerate([*weights, *weights])]
    for one, completion in zip(asked, run(sampler, *asked), strict=True):
        merged_weights = merged(tiny()[1], weights[one.run_id], 0.5)
        np.testing.assert_allclose(completion.behavior_logprobs, reference_logprobs(merged_weights, one.prompt_ids, completion, 1.3), atol=1e-4)
    with_head = reference_logprobs(merged(tiny()[1], weights["both"], 0.5), asked[0].prompt_ids, completion, 1.3)
    without = reference_logprobs(merged(tiny()[1], weights["both"], 0.5) | {HEAD: tiny()[1]["embed"]}, asked[0].prompt_ids, completion, 1.3)
    assert np.abs(np.array(with_head) - without).max() > 0.1, "an adapter of the unembedding that was left out would show"


def test_a_run_with_an_adapted_unembedding_samples_the_same_bits_beside_others():
    mine = [request(prompt(30, seed=n), run="mine", max_tokens=16, seed=n) for n in range(3)]
    found = []
    for others in ((), ("a", "b")):
        sampler = engine(shapes=TOPS)
        sampler.publish("mine", 0, adapter(0, tops=(HEAD,)), 1.0)
        for number, run_id in enumerate(others):
            broken = adapter(number + 1, tops=(HEAD,))
            broken["b"][HEAD][:] = np.inf
            sampler.publish(run_id, 0, adapter(number + 1) if run_id == "a" else broken, 1.0)
        beside = [request(prompt(20, seed=9), run=run_id, tenant=run_id, max_tokens=12) for run_id in others if run_id == "a"]
        failing = [request(prompt(20, seed=9), run=run_id, tenant=run_id, max_tokens=12) for run_id in others if run_id == "b"]
        again = [replace(one, request_id=f"{one.request_id}/{len(others)}") for one in mine]
        found.append(run_all(sampler, *again, *beside, *failing)[:3])
    assert found[0] == found[1]


def run_all(sampler, *requests):
    """Completions, and errors in the place of those that failed."""

    async def settled(asked):
        try:
            return await sampler.sample(asked)
        except RunFailedError as error:
            return error

    async def main():
        return await drive(sampler, *(settled(asked) for asked in requests))

    return asyncio.run(main())


@pytest.mark.parametrize("tops", [(), (HEAD,), (VALUE,), (HEAD, VALUE)])
@pytest.mark.parametrize("rank", [2, RANK])
def test_the_checksum_counts_top_modules_and_no_padding(tops, rank):
    sampler, weights = engine(shapes=TOPS), adapter(3, rank=rank, tops=tops)
    sampler.publish("a", 0, adapter(4, tops=(HEAD, VALUE)), 1.0)
    sampler.publish("a", 1, weights, 1.0)
    assert sampler.checksum("a", 1) == checksum(weights)
    for module in tops:
        weights["b"][module].view(np.uint32)[0, 1, 0] ^= np.uint32(1)
        assert sampler.checksum("a", 1) != checksum(weights)


def test_adapters_that_have_no_room_in_a_slot_are_refused():
    sampler = engine()
    refused = {
        "set learner.has_unembed": adapter(0, tops=(HEAD,)),
        "set learner.has_values": adapter(0, tops=(VALUE,)),
        "its width is 8, the slots have 4": adapter(0, rank=8),
    }
    for match, weights in refused.items():
        with pytest.raises(InvalidRequestError, match=match):
            sampler.publish("a", 0, weights, 1.0)
    assert sampler.num_free_slots == 7


def test_a_publish_switches_the_version_between_tokens_and_aborts_nothing():
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)

    def publish(step):
        if step == 3:
            sampler.publish("a", 1, adapter(1), 1.0)

    asked = [request(prompt(20), run="a", max_tokens=40, seed=n) for n in range(3)]
    for completion in run(sampler, *asked, between=publish):
        switch = completion.versions.index(1)
        assert completion.versions == (0,) * switch + (1,) * (40 - switch)
        assert switch % 4 == 0
        assert len(completion.sampled_ids) == 40
    assert sampler.counts.num_mixed == 3 * (40 - switch)


def test_kept_keys_and_values_are_those_of_the_version_that_read_them():
    """After a publish the prompt's K/V stay as version 0 made them, and new positions use version 1: a reference that mixes alike."""
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)
    asked = request(prompt(20), run="a", max_tokens=8, temperature=0.0)
    (old,) = run(sampler, asked)

    def publish(step):
        if step == 1:
            sampler.publish("a", 1, adapter(0), 1.0)

    (same_bytes,) = run(engine_with(adapter(0)), request(prompt(20), run="a", max_tokens=8, temperature=0.0), between=None)
    (kept,) = run(sampler, request(prompt(20), run="a", max_tokens=8, temperature=0.0), between=publish)
    assert kept.sampled_ids == old.sampled_ids == same_bytes.sampled_ids
    assert kept.behavior_logprobs == old.behavior_logprobs


def engine_with(weights, scale=1.0):
    sampler = engine()
    sampler.publish("a", 0, weights, scale)
    return sampler


def test_a_pinned_request_keeps_its_version_and_no_publish_waits_for_its_slot():
    sampler = engine(num_slots=2)
    sampler.publish("a", 0, adapter(0), 1.0)

    def publish(step):
        if step == 2:
            sampler.publish("a", 1, adapter(1), 1.0)
            sampler.publish("b", 0, adapter(2), 1.0)
            assert (sampler.num_free_slots, sampler.num_versions) == (0, 3)
            for run_id, version, seed in (("b", 0, 2), ("a", 1, 1)):
                assert sampler.checksum(run_id, version) == checksum(adapter(seed)), "in the one slot, between two dispatches"

    pinned = request(prompt(20), run="a", version=0, max_tokens=30, seed=7)
    (completion,) = run(sampler, pinned, between=publish)
    assert set(completion.versions) == {0}
    weights = merged(tiny()[1], adapter(0), 1.0)
    np.testing.assert_allclose(completion.behavior_logprobs, reference_logprobs(weights, pinned.prompt_ids, completion, 1.0), atol=1e-4)
    assert sampler.num_versions == 2
    with pytest.raises(UnknownVersionError):
        run(sampler, request(run="a", version=0))


def test_a_request_that_came_before_a_publish_keeps_the_version_that_it_names():
    sampler = engine_with(adapter(0))

    async def scenario():
        named = asyncio.ensure_future(sampler.sample(request(run="a", version=0)))
        await asyncio.sleep(0)
        sampler.publish("a", 1, adapter(1), 1.0)
        return await drive(sampler, asyncio.wait_for(named, 60))

    (completion,) = asyncio.run(scenario())
    assert set(completion.versions) == {0}


def test_a_pin_holds_a_version_for_later_requests():
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)
    sampler.pin("a", 0)
    sampler.publish("a", 1, adapter(1), 1.0)
    (held,) = run(sampler, request(run="a", version=0))
    assert held.versions[0] == 0
    sampler.unpin("a", 0)
    with pytest.raises(UnknownVersionError, match=r"kept are \[1\]"):
        sampler.checksum("a", 0)


def test_cached_prefixes_are_never_served_to_another_version_or_run():
    """Case 61: the same prompt before and after a publish gives what an empty cache gives."""
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)
    sampler.publish("b", 0, adapter(1), 1.0)
    shared = prompt(70)

    def ask(run_id, engine_, episode=""):
        return run(engine_, request(shared, run=run_id, max_tokens=12, seed=3, episode=episode))[0]

    ask("a", sampler, "one")
    ask("b", sampler, "one")
    sampler.publish("a", 1, adapter(1), 1.0)
    warm = ask("a", sampler, "two")
    fresh = engine()
    fresh.publish("a", 1, adapter(1), 1.0)
    cold = ask("a", fresh)
    assert warm == cold
    assert sampler.counts.num_prefilled == 3 * 69


def test_an_episode_keeps_its_own_pages_across_a_publish():
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)
    first = request(prompt(40), run="a", episode="e", max_tokens=8)
    (turn,) = run(sampler, first)
    sampler.publish("a", 1, adapter(1), 1.0)
    before = sampler.counts.num_prefilled
    follow = first.prompt_ids + turn.sampled_ids + (9, 9, 9)
    run(sampler, request(follow, run="a", episode="e", max_tokens=8))
    assert sampler.counts.num_prefilled - before == 3
    assert sampler.counts.num_mixed == 8
    run(sampler, request(follow, run="a", episode="other", max_tokens=8))
    assert sampler.counts.num_prefilled - before == 3 + len(follow) - 1


def constant_base():
    """A tiny base whose hidden states share one large positive feature, which adapters can turn into any constant output."""
    params = {name: value.copy() for name, value in tiny()[1].items() if name != "layers"} | {"layers": tiny()[1]["layers"]}
    params["embed"][:, 0] = 6.0
    params["final_norm"] = np.full_like(params["final_norm"], 4.0)
    return place(params), params


def constant_adapter(params, token):
    """v reads the constant feature, o turns it into the token's embedding: every position predicts `token`."""
    model = tiny()[0]
    a = {name: np.zeros((model.num_layers, size, RANK), np.float32) for name, (size, _) in module_sizes(model).items()}
    b = {name: np.zeros((model.num_layers, RANK, size), np.float32) for name, (_, size) in module_sizes(model).items()}
    a["v"][-1, 0, 0] = 1.0
    b["v"][-1, 0, :] = 10.0
    a["o"][-1, :, 0] = 1.0
    direction = params["embed"][token].copy()
    direction[0] = 0.0
    b["o"][-1, 0, :] = direction
    return {"a": a, "b": b}


def test_each_tenant_sees_only_its_own_adapters_output():
    """Case 92, stop-ship: four tenants on few slots, published and evicted while others decode."""
    base, params = constant_base()
    sampler = engine(base=base, num_slots=4)
    tokens = {"a": 20, "b": 40, "c": 60, "d": 80}

    async def stream(run_id, number):
        return run_id, await sampler.sample(
            request(prompt(5 + number, seed=number), run=run_id, tenant=run_id, max_tokens=5 + number % 9, seed=number)
        )

    async def scenario():
        rng = np.random.default_rng(0)
        tasks, versions = [], {}
        for number in range(120):
            run_id = "abcd"[rng.integers(4)]
            if run_id not in versions and len(versions) == 3:
                evicted = sorted(versions)[rng.integers(3)]
                sampler.retire(evicted)
                del versions[evicted]
            if run_id not in versions or rng.random() < 0.3:
                versions[run_id] = number
                sampler.publish(run_id, number, constant_adapter(params, tokens[run_id]), 1.0)
            tasks.append(asyncio.ensure_future(stream(run_id, number)))
            await asyncio.sleep(0)
            for _ in range(rng.integers(3)):
                sampler.step()
        while sampler.step():
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(scenario())
    finished = [outcome for outcome in outcomes if not isinstance(outcome, RequestCancelledError)]
    assert len(finished) > 40
    for run_id, completion in finished:
        assert set(completion.sampled_ids) == {tokens[run_id]}


def test_a_broken_adapter_fails_its_own_requests_and_leaves_neighbours_bits_alone():
    healthy = [request(prompt(30, seed=n), max_tokens=20, seed=n) for n in range(4)]
    expected = run(engine(), *healthy)
    sampler = engine(num_pages=40, max_context=64)
    broken = adapter(0)
    broken["b"]["v"][:] = np.nan
    sampler.publish("nan", 0, broken, 1.0)
    for _ in range(3):
        with pytest.raises(RunFailedError, match="not finite"):
            run(sampler, *(request(prompt(40, seed=n), run="nan", tenant="bad", max_tokens=20) for n in range(4)))
        while sampler.step():
            pass
    beside = [request(one.prompt_ids, max_tokens=20, seed=one.params.seed) for one in healthy]
    assert run(sampler, *beside) == expected


def test_many_publishes_leave_slots_and_programs_flat():
    sampler = engine(num_slots=3)
    weights = [adapter(0), adapter(1)]
    sampler.publish("a", 0, weights[0], 1.0)
    sampler.publish("b", 0, weights[1], 1.0)
    programs = None
    for version in range(1, 60):
        for run_id in "ab":
            sampler.publish(run_id, version, weights[version % 2], 1.0)
            assert sampler.checksum(run_id, version) == int(checksum(weights[version % 2]))
        programs = programs or sampler.num_programs
    assert (sampler.num_programs, sampler.num_free_slots) == (programs, 0)


def test_the_checksum_is_the_committers_and_sees_every_bit():
    sampler = engine()
    weights = adapter(3)
    sampler.publish("a", 0, weights, 1.0)
    assert sampler.checksum("a", 0) == int(checksum(weights))
    weights["b"]["down"][1, 2, 3] = np.nextafter(weights["b"]["down"][1, 2, 3], np.float32(9))
    assert sampler.checksum("a", 0) != int(checksum(weights))


def test_publishes_that_go_back_or_do_not_fit_are_refused_and_change_nothing():
    sampler = engine()
    sampler.publish("a", 5, adapter(0), 1.0)
    before = sampler.checksum("a", 5)
    for version in (5, 4, -1):
        with pytest.raises(StateConflictError, match="never goes back"):
            sampler.publish("a", version, adapter(1), 1.0)
    wrong = adapter(1)
    wrong["a"]["q"] = wrong["a"]["q"][:, :, :2]
    with pytest.raises(InvalidRequestError, match="module 'q'"):
        sampler.publish("a", 6, wrong, 1.0)
    with pytest.raises(InvalidRequestError, match="scale"):
        sampler.publish("a", 6, adapter(1), float("nan"))
    assert (sampler.newest_version("a"), sampler.checksum("a", 5)) == (5, before)


def test_retiring_a_run_cancels_its_requests_and_frees_its_slot():
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)

    def retire(step):
        if step == 2:
            sampler.retire("a")

    with pytest.raises(RequestCancelledError, match="stopped"):
        run(sampler, request(run="a", max_tokens=100), between=retire)
    assert (sampler.num_free_slots, sampler.num_held_pages) == (7, 0)
    with pytest.raises(UnknownVersionError):
        run(sampler, request(run="a"))
