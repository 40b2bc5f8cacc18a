"""Streams, stop texts and deadlines: what a request's reader gets, when, and what is left of a request that ends before its length."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_builders import adapter, drive, engine, prompt, reference_logprobs, request, run, tiny

from noria.actors.rules import stops
from noria.clock import VirtualClock
from noria.errors import DeadlineExceededError, InvalidRequestError, RequestCancelledError, RunFailedError, StageStoppedError
from noria.sampler.stops import StopSearch, stops_of
from noria.text.tokenizer import ByteTokenizer
from noria.types import MAX_STOP_TEXTS, SamplingParams

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def sampler():
    return engine(tokenizer=TOKENIZER)


async def read(sampler, asked):
    return [tokens async for tokens in sampler.stream(asked)]


def stream(sampler, *requests, between=None):
    async def main():
        return await drive(sampler, *(read(sampler, one) for one in requests), between=between)

    return asyncio.run(main())


# Streams


def test_a_stream_is_the_completion_in_pieces_one_for_each_dispatch(sampler):
    asked = [request(prompt(n, seed=n), max_tokens=n, seed=n) for n in (1, 4, 5, 30)]
    for one, items in zip(asked, stream(sampler, *asked), strict=True):
        (whole,) = run(sampler, request(one.prompt_ids, max_tokens=one.params.max_tokens, seed=one.params.seed))
        assert sum((tokens.sampled_ids for tokens in items), ()) == whole.sampled_ids
        assert sum((tokens.behavior_logprobs for tokens in items), ()) == whole.behavior_logprobs
        assert sum((tokens.versions for tokens in items), ()) == whole.versions
        assert [len(tokens.sampled_ids) for tokens in items[:-1]] == [4] * ((len(whole.sampled_ids) - 1) // 4)
        assert [tokens.finish_reason for tokens in items] == [None] * (len(items) - 1) + [whole.finish_reason]
        assert items[-1].completion == whole


def test_a_stream_names_the_version_of_each_token():
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)

    def publish(step):
        if step == 3:
            sampler.publish("a", 1, adapter(1), 1.0)

    (items,) = stream(sampler, request(run="a", max_tokens=24), between=publish)
    versions = [set(tokens.versions) for tokens in items]
    assert versions == sorted(versions, key=min)
    assert set.union(*versions) == {0, 1}
    assert items[-1].completion.num_mixed == sum(len(tokens.sampled_ids) for tokens in items if tokens.versions[0])


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(sampler):
    async def main():
        slow = sampler.stream(request(max_tokens=60, seed=3))
        first = asyncio.ensure_future(anext(slow))
        (whole,) = await drive(sampler, sampler.sample(request(prompt(30), max_tokens=80)))
        assert not sampler.has_work, "all of it was sampled, though one item was read"
        items = [await first, *[tokens async for tokens in slow]]
        return whole, items

    whole, items = asyncio.run(main())
    assert len(whole.sampled_ids) == 80
    assert sum(len(tokens.sampled_ids) for tokens in items) == 60 == len(items[-1].completion.sampled_ids)


def test_closing_a_stream_frees_its_lane_and_pages_at_the_next_step(sampler):
    async def main():
        async with aclosing(sampler.stream(request(prompt(60), max_tokens=150))) as slow:
            await drive(sampler, anext(slow))
            assert sampler.num_held_pages > 3
        assert not sampler.step()

    asyncio.run(main())
    assert (sampler.num_held_pages, sampler.waiting()) == (0, [])


def test_cancelling_the_reader_of_a_stream_cancels_its_request(sampler):
    async def main():
        reading = asyncio.ensure_future(read(sampler, request(prompt(60), max_tokens=150)))
        await asyncio.sleep(0)
        for _ in range(5):
            sampler.step()
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert not sampler.step()

    asyncio.run(main())
    assert (sampler.num_held_pages, sampler.waiting()) == (0, [])


def test_a_stream_raises_what_its_request_ends_with():
    sampler, broken = engine(), adapter(0)
    broken["b"]["v"][:] = np.nan
    sampler.publish("nan", 0, broken, 1.0)
    with pytest.raises(RunFailedError, match="not finite"):
        stream(sampler, request(prompt(40), run="nan"))
    with pytest.raises(InvalidRequestError, match="empty"):
        stream(sampler, request(()))
    sampler.publish("a", 0, adapter(0), 1.0)
    with pytest.raises(RequestCancelledError):
        stream(sampler, request(run="a", max_tokens=100), between=lambda step: sampler.retire("a") if step == 2 else None)
    with pytest.raises(StageStoppedError, match="lost"):
        stream(sampler, request(max_tokens=100), between=lambda step: sampler.fail(ValueError("lost")) if step == 2 else None)
    assert sampler.num_held_pages in (0, 1, 2)


# Stop texts


def text_so_far(ids):
    """The text of ids, without a last character that a later byte may complete."""
    text = TOKENIZER.decode(ids)
    return text[:-1] if text.endswith("\ufffd") else text


def naive_stop(ids, texts):
    return next((k for k in range(1, len(ids) + 1) if any(stop in text_so_far(ids[:k]) for stop in texts)), None)


PIECES = st.sampled_from(["a", "b", "ab", "é", "你", "🙂", "é你", "\n", "<|sep|>", "</a"])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=30), st.lists(st.lists(PIECES, min_size=1, max_size=3).map("".join), min_size=1, max_size=3), st.data())
def test_a_stop_text_is_found_at_the_token_that_completes_it_wherever_dispatches_end(pieces, texts, data):
    ids, found, start = TOKENIZER.encode("".join(pieces)), None, 0
    search = StopSearch(TOKENIZER, texts)
    while start < len(ids) and found is None:
        size = data.draw(st.integers(1, 5))
        count = search.find(ids[start : start + size])
        found = None if count is None else start + count
        start += size
    assert found == naive_stop(ids, texts)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_completion_ends_with_the_token_after_which_its_text_contains_a_stop_text(sampler, length):
    """The tiny base samples bytes: any text of two or more characters lies across token borders."""
    (free,) = run(sampler, request(prompt(20), max_tokens=60, seed=5))
    checked = 0
    for start in range(0, 50, 3):
        stop = TOKENIZER.decode(free.sampled_ids[start : start + length])
        if len(stop) != length or "\ufffd" in stop:
            continue
        checked += 1
        (cut,) = run(sampler, request(prompt(20), max_tokens=60, seed=5, stop=("no such text", stop)))
        count = naive_stop(free.sampled_ids, (stop,))
        assert (cut.sampled_ids, cut.finish_reason) == (free.sampled_ids[:count], "stop")
        assert cut.behavior_logprobs == free.behavior_logprobs[:count]
    assert checked


def test_what_was_sampled_beyond_a_stop_text_is_dropped_and_never_cached():
    sampler = engine(tokenizer=TOKENIZER, steps_per_dispatch=8)
    (free,) = run(sampler, request(prompt(30), max_tokens=40, seed=9))
    stops = [TOKENIZER.decode(free.sampled_ids[k - 2 : k]) for k in range(10, 40) if k % 8]
    stop = next(text for text in stops if len(text) == 2 and "\ufffd" not in text and naive_stop(free.sampled_ids, (text,)) % 8)
    count = naive_stop(free.sampled_ids, (stop,))
    sampled, prefilled = sampler.counts.num_sampled, sampler.counts.num_prefilled
    (cut,) = run(sampler, request(prompt(30), max_tokens=40, seed=9, stop=(stop,), episode="e"))
    assert len(cut.sampled_ids) == count == sampler.counts.num_sampled - sampled
    second = request(prompt(30) + cut.sampled_ids + prompt(40, seed=4), episode="e", max_tokens=12, seed=2)
    (answer,) = run(sampler, second)
    assert sampler.counts.num_prefilled - prefilled <= 40 + 1
    np.testing.assert_allclose(answer.behavior_logprobs, reference_logprobs(tiny()[1], second.prompt_ids, answer, 1.0), atol=1e-4)
    assert sampler.num_held_pages == 0


def test_a_stream_ends_at_its_stop_text(sampler):
    (free,) = run(sampler, request(prompt(20), max_tokens=60, seed=5))
    count, stop = next((k, text) for k in range(6, 60) if "\ufffd" not in (text := TOKENIZER.decode(free.sampled_ids[k - 3 : k])) and len(text) == 3)
    count = naive_stop(free.sampled_ids, (stop,))
    (items,) = stream(sampler, request(prompt(20), max_tokens=60, seed=5, stop=(stop,)))
    assert sum((tokens.sampled_ids for tokens in items), ()) == free.sampled_ids[:count]
    assert items[-1].finish_reason == "stop"


def test_a_special_tokens_text_is_a_stop_id_and_stop_texts_need_a_tokenizer():
    """Case 17: no decoded text contains a special token, and a stop text of one ordinary token is looked for inside others too."""
    params = SamplingParams(4, stop=("<|sep|>", "\n", "<|sep|>é"), stop_ids=(7,))
    assert stops_of(params, 2, TOKENIZER) == ((2, 7, TOKENIZER.SPECIAL["<|sep|>"]), ("\n", "<|sep|>é"))
    with pytest.raises(InvalidRequestError, match="need a tokenizer"):
        run(engine(), request(stop=("a",)))


# Deadlines


def test_a_request_past_its_deadline_says_what_it_was_waiting_for():
    clock = VirtualClock()
    sampler = engine(clock=clock, num_pages=40)

    def later(step):
        clock.advance(1.0)

    async def settled(asked):
        try:
            return await sampler.sample(asked)
        except DeadlineExceededError as error:
            return str(error)

    def ask(*requests):
        async def main():
            return await drive(sampler, *(settled(one) for one in requests), between=later)

        return asyncio.run(main())

    quick, slow = ask(request(max_tokens=4, timeout_s=30), request(prompt(10), max_tokens=200, timeout_s=12.5))
    assert len(quick.sampled_ids) == 4
    assert "12.5" in slow
    assert "of at most 200 tokens sampled, decoding" in slow
    crowd = [request((n,), max_tokens=200, timeout_s=900) for n in range(10, 26)]
    *_, last = ask(*crowd, request((5,), max_tokens=4, timeout_s=3))
    assert "0 of at most 4 tokens sampled, waiting for " in last
    assert (sampler.num_held_pages, sampler.has_work) == (0, False)


def test_a_deadline_counts_from_when_the_request_was_made_and_frees_at_once():
    clock = VirtualClock()
    sampler = engine(clock=clock)

    async def main():
        task = asyncio.ensure_future(sampler.sample(request(prompt(60), max_tokens=100, timeout_s=5)))
        await asyncio.sleep(0)
        sampler.step()
        clock.advance(5.1)
        assert not sampler.step()
        assert sampler.num_held_pages == 0
        with pytest.raises(DeadlineExceededError, match=r"prefill|decoding"):
            await task

    asyncio.run(main())


# What a completion says of itself


@pytest.mark.parametrize(("params", "is_trainable"), [({}, True), ({"temperature": 0.0}, False), ({"top_k": 3}, False), ({"top_p": 0.5}, False)])
def test_a_completion_says_whether_its_tokens_may_train(sampler, params, is_trainable):
    (completion,) = run(sampler, request(max_tokens=2, **params))
    assert completion.is_trainable == is_trainable


def test_a_completion_counts_its_tokens_over_keys_and_values_of_another_version():
    """Case 62: per request, and not an average that stays near 0."""
    sampler = engine()
    sampler.publish("a", 0, adapter(0), 1.0)
    sampler.publish("b", 0, adapter(0), 1.0)

    def publish(step):
        if step == 4:
            sampler.publish("a", 1, adapter(1), 1.0)

    mixed, pinned, other, one_id = run(
        sampler,
        request(prompt(20), run="a", max_tokens=40),
        request(prompt(20), run="a", version=0, max_tokens=40),
        request(prompt(20), run="b", max_tokens=40),
        request((9,), run="a", max_tokens=40),
        between=publish,
    )
    for completion in (mixed, one_id):
        assert 0 < completion.num_mixed == completion.versions.count(1) < 40
    assert (pinned.num_mixed, other.num_mixed) == (0, 0)
    assert sampler.counts.num_mixed == mixed.num_mixed + one_id.num_mixed


def test_a_run_may_have_as_many_stop_texts_of_one_token_as_a_run_file_allows(sampler):
    ids, texts = stops(tuple("abcdefghij"[:MAX_STOP_TEXTS]), TOKENIZER)
    assert texts == tuple("abcdefghij"[:MAX_STOP_TEXTS])
    (completion,) = run(sampler, request(stop_ids=ids, max_tokens=200))
    assert (completion.finish_reason == "stop") == (completion.sampled_ids[-1] in (*ids, 2))
