"""Sampling end to end on the tiny model, one thread: what is sampled, with which log-probabilities, and what is shared and freed."""

import asyncio
import math

import numpy as np
import pytest
from jax import monitoring
from sampler_builders import NoSpans, adapter, config, drive, engine, prompt, reference_logprobs, request, run, tiny

from noria.errors import ConfigError, InvalidRequestError, PromptTooLongError, StageStoppedError, UnknownVersionError
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.text.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def sampler():
    return engine(tokenizer=ByteTokenizer())


def same(left, right):
    return left.sampled_ids == right.sampled_ids and left.behavior_logprobs == right.behavior_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_logprobs_are_those_of_a_full_forward_pass_after_temperature(sampler, temperature):
    requests = [request(prompt(n, seed=n), max_tokens=24, temperature=temperature, seed=n) for n in (1, 2, 16, 17, 33, 70)]
    for asked, completion in zip(requests, run(sampler, *requests), strict=True):
        expected = reference_logprobs(tiny()[1], asked.prompt_ids, completion, temperature)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=1e-4)


def test_temperature_zero_takes_the_most_likely_token(sampler):
    asked = request(prompt(20), temperature=0.0, max_tokens=12)
    (completion,) = run(sampler, asked)
    ids = asked.prompt_ids
    for token, logprob in zip(completion.sampled_ids, completion.behavior_logprobs, strict=True):
        assert logprob >= math.log(1 / tiny()[0].vocab_size)
        ids = (*ids, token)
    again = run(sampler, request(asked.prompt_ids, temperature=0.0, max_tokens=12, seed=99))[0]
    assert again.sampled_ids == completion.sampled_ids


def test_sampled_frequencies_are_the_probabilities(sampler):
    requests = [request((5, 6, 7), max_tokens=1, seed=3, sample_index=n) for n in range(3000)]
    counts = np.bincount([c.sampled_ids[0] for c in run(sampler, *requests)], minlength=tiny()[0].vocab_size)
    from_logprobs = {c.sampled_ids[0]: math.exp(c.behavior_logprobs[0]) for c in run(sampler, *requests)}
    for token, probability in from_logprobs.items():
        deviation = math.sqrt(3000 * probability * (1 - probability))
        assert abs(counts[token] - 3000 * probability) < 5 * deviation + 1


def test_neighbours_do_not_change_a_seeded_request(sampler):
    asked = [request(prompt(n, seed=n), max_tokens=20, seed=n, episode=f"e{n}") for n in (3, 40)]
    alone = [run(sampler, one)[0] for one in asked]
    crowd = [request(prompt(n, seed=n), max_tokens=n, seed=n, temperature=0.5 + n / 10) for n in range(4, 24)]
    renamed = [request(one.prompt_ids, max_tokens=20, seed=one.params.seed) for one in asked]
    beside = run(sampler, *crowd[:7], renamed[0], *crowd[7:], renamed[1])
    assert same(beside[7], alone[0])
    assert same(beside[-1], alone[1])


def test_sample_index_and_seed_change_what_is_sampled(sampler):
    completions = run(sampler, *(request(seed=seed, sample_index=index, max_tokens=16) for seed in (1, 2, 1 + 2**40) for index in (0, 1)))
    assert len({c.sampled_ids for c in completions}) == 6


def test_requests_join_and_leave_while_others_decode(sampler):
    long = request(prompt(10), max_tokens=60, seed=8)

    async def scenario():
        first = asyncio.ensure_future(sampler.sample(long))
        await asyncio.sleep(0)
        for _ in range(3):
            sampler.step()
        short = asyncio.ensure_future(sampler.sample(request(max_tokens=2)))
        await asyncio.sleep(0)
        while not short.done():
            sampler.step()
            await asyncio.sleep(0)
        assert not first.done()
        return (await drive(sampler, asyncio.wait_for(first, 60)))[0]

    joined = asyncio.run(scenario())
    assert same(joined, run(sampler, request(long.prompt_ids, max_tokens=60, seed=8))[0])


def test_a_groups_prompt_is_prefilled_once():
    sampler = engine()
    group = [request(prompt(75), max_tokens=6, sample_index=n) for n in range(8)]
    run(sampler, *group)
    assert sampler.counts.num_prefilled == 74
    run(sampler, request((*prompt(75), 3, 4), max_tokens=2))
    assert sampler.counts.num_prefilled == 74 + 1
    counts = sampler.schedule_counts
    assert (counts.num_asked, counts.num_found) == (8 * 74 + 76, 7 * 74 + 75)


def test_others_get_the_prompt_when_its_first_requester_is_cancelled():
    sampler = engine()

    async def scenario():
        group = [asyncio.ensure_future(sampler.sample(request(prompt(200), max_tokens=4, sample_index=n))) for n in range(3)]
        await asyncio.sleep(0)
        sampler.step()
        group[0].cancel()
        await asyncio.sleep(0)
        return await drive(sampler, *(asyncio.wait_for(one, 60) for one in group[1:]))

    assert len(asyncio.run(scenario())) == 2
    assert sampler.counts.num_prefilled == 199


def test_a_second_turn_prefills_only_what_is_new():
    sampler = engine()
    first = request(prompt(40), max_tokens=10, episode="e", seed=5)
    (turn,) = run(sampler, first)
    known = sampler.counts.num_prefilled
    second = request(first.prompt_ids + turn.sampled_ids + prompt(9, seed=3), max_tokens=10, episode="e", seed=6)
    (answer,) = run(sampler, second)
    assert sampler.counts.num_prefilled - known == 9
    np.testing.assert_allclose(answer.behavior_logprobs, reference_logprobs(tiny()[1], second.prompt_ids, answer, 1.0), atol=1e-4)


def test_cancelling_frees_lane_and_pages_at_the_next_step():
    sampler = engine()

    async def scenario():
        tasks = [asyncio.ensure_future(sampler.sample(request(prompt(60, seed=n), max_tokens=100))) for n in range(20)]
        await asyncio.sleep(0)
        for _ in range(20):
            sampler.step()
        assert sampler.num_held_pages > 16 * 4
        assert {w.reason for w in sampler.waiting()} == {"decoding", "lanes"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not sampler.step()

    asyncio.run(scenario())
    assert (sampler.num_held_pages, sampler.has_work, sampler.waiting()) == (0, False, [])


def test_stop_ids_end_of_text_and_max_tokens_end_a_completion():
    sampler = engine()
    (free,) = run(sampler, request(max_tokens=30, seed=4))
    stop = free.sampled_ids[11]
    first = free.sampled_ids.index(stop)
    assert (free.finish_reason, len(free.sampled_ids)) == ("length", 30)
    (stopped,) = run(sampler, request(max_tokens=30, seed=4, stop_ids=(stop, 251)))
    assert (stopped.sampled_ids, stopped.finish_reason) == (free.sampled_ids[: first + 1], "stop")
    (ended,) = run(engine(eos_id=stop), request(max_tokens=30, seed=4))
    assert same(ended, stopped)
    (last,) = run(sampler, request(max_tokens=first + 1, seed=4, stop_ids=(stop,)))
    assert last.finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1, 10**6)}, "1000000"),
        ({"prompt": (-1,)}, "-1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-38}, r"temperature must be 0 or in \[1e-06, 1e\+06\], got 1e-38"),
        ({"temperature": 1e39}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"sample_index": 2**31}, "sample_index"),
        ({"stop_ids": (999,)}, "stop"),
        ({"stop_ids": tuple(range(10, 26))}, "at most 16 stop ids.*got 17"),
        ({"top_k": -1}, "top_k must be in"),
        ({"top_k": 2**31}, "top_k must be in"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"num_top": 21}, r"num_top must be in \[0, 20\], got 21"),
        ({"num_top": -1}, "num_top"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"timeout_s": math.inf}, "timeout_s"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ("END", "")}, "empty stop text"),
        ({"stop": tuple("abcdefghi")}, "at most 8 stop texts, got 9"),
        ({"stop": ("a", "b" * 1025)}, "at most 1024 characters, got 1025"),
    ],
)
def test_bad_requests_are_refused_at_the_edge(sampler, changes, word):
    with pytest.raises(InvalidRequestError, match=word):
        run(sampler, request(**changes))
    assert not sampler.has_work


def test_a_prompt_that_leaves_too_little_room_is_refused_with_both_numbers(sampler):
    with pytest.raises(PromptTooLongError, match=r"250 ids and max_tokens = 7.*256"):
        run(sampler, request(prompt(250), max_tokens=7))
    assert len(run(sampler, request(prompt(250), max_tokens=6))[0].sampled_ids) == 6


def test_unknown_runs_and_versions_and_duplicate_ids_are_refused(sampler):
    with pytest.raises(UnknownVersionError, match="ghost"):
        run(sampler, request(run="ghost"))
    with pytest.raises(UnknownVersionError, match="version 3"):
        run(sampler, request(version=3))
    twin = request()
    with pytest.raises(InvalidRequestError, match="unique"):
        run(sampler, twin, twin)
    while sampler.step():
        pass


def test_closing_fails_what_is_left_and_what_comes_later():
    sampler = engine()

    async def scenario():
        tasks = [asyncio.ensure_future(sampler.sample(request(max_tokens=200))) for _ in range(3)]
        await asyncio.sleep(0)
        sampler.step()
        tasks.append(asyncio.ensure_future(sampler.sample(request())))
        await asyncio.sleep(0)
        sampler.fail(ValueError("device lost"))
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(scenario())
    assert [type(outcome) for outcome in outcomes] == [StageStoppedError] * 4
    assert "device lost" in str(outcomes[0])
    assert not sampler.has_work
    assert not sampler.step()
    with pytest.raises(StageStoppedError):
        run(sampler, request())


def test_a_pool_too_small_for_one_request_is_refused_and_the_smallest_one_serves_any():
    with pytest.raises(ConfigError, match="num_pages"):
        engine(num_pages=18)
    sampler = engine(num_pages=19)
    (first,) = run(sampler, request(prompt(200), max_tokens=56, seed=2))
    (shared,) = run(sampler, request((*prompt(200)[:199], 9, *prompt(30, seed=2)), max_tokens=26))
    assert (len(first.sampled_ids), len(shared.sampled_ids)) == (56, 26)
    assert sampler.num_held_pages == 0


def test_nothing_compiles_after_warm_up():
    spans = NoSpans()
    sampler = engine(shapes=Shapes(lanes=(8, 16), rows=(2, 4)), spans=spans)
    sampler.warm_up()
    num_programs = sampler.num_programs
    sampler.publish("a", 1, adapter(1), 0.5)
    rng = np.random.default_rng(0)
    requests = [
        request(prompt(int(rng.integers(1, 120)), seed=n), run=("", "a")[n % 2], max_tokens=int(rng.integers(1, 40)), temperature=n % 3 / 2, seed=n)
        for n in range(200)
    ]
    compiled = []

    def listen(event, duration, **labels):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(labels)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        completions = run(sampler, *requests)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert (len(completions), compiled, sampler.num_programs) == (200, [], num_programs)
    assert sampler.num_held_pages == 0
    assert set(spans.names) == {("sampler", "prefill"), ("sampler", "decode"), ("sampler", "adapter")}
    assert 0.5 < sampler.occupancy <= 1


def test_a_context_longer_than_the_models_is_refused():
    model, _, base = tiny()
    with pytest.raises(ConfigError, match="2048"):
        SamplerEngine(base, model, config(max_context=4096, num_pages=1024), rank_classes=(4,), eos_id=2, spans=NoSpans())


@pytest.mark.parametrize("changes", [{"top_k": 2**31 - 1}, {"temperature": 1e-6, "num_top": 20}, {"temperature": 1e6, "num_top": 20}])
def test_the_largest_and_smallest_settings_give_finite_numbers(sampler, changes):
    (completion,) = run(sampler, request(max_tokens=4, **changes))
    assert len(completion.sampled_ids) == 4
    assert all(math.isfinite(x) for x in (*completion.behavior_logprobs, *(x for top in completion.top for _, x in top)))


def test_no_stop_text_is_tokenized_before_their_number_is_known():
    class Counting(ByteTokenizer):
        num_encoded = 0

        def token_id(self, text):
            self.num_encoded += 1
            return super().token_id(text)

    tokenizer = Counting()
    with pytest.raises(InvalidRequestError, match="at most 8 stop texts"):
        run(engine(tokenizer=tokenizer), request(stop=("x",) * 1000))
    assert not tokenizer.num_encoded


def test_a_request_that_breaks_the_sampler_hears_of_it_too():
    """Ids in a list cannot be looked up: an error of the caller's, which types forbid."""
    sampler = engine()
    run(sampler, request(prompt(40), episode="e"))

    async def scenario():
        task = asyncio.ensure_future(sampler.sample(request(list(prompt(40)), episode="e")))
        await asyncio.sleep(0)
        with pytest.raises(TypeError) as broken:
            sampler.step()
        sampler.fail(broken.value)
        with pytest.raises(StageStoppedError, match="unhashable"):
            await asyncio.wait_for(task, 30)

    asyncio.run(scenario())
