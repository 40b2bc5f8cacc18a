"""The whole sampler end to end: whatever is batched, chunked, shared, preempted, stored or recomputed, answers are those of the naive one, and keep
their bits whatever else is going on.

Four adapters of two classes of ranks for two slots, and few pages.
"""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_sampler import SIZES, TIE, check, logits_of, possible, weights_of
from sampler_builders import adapter, drive, engine, prompt, request, run, tiny

from noria.model.lora import HEAD
from noria.text.tokenizer import ByteTokenizer
from noria.types import MAX_TOP, SamplingParams

SCALE = 0.5
ADAPTERS = {"four": {"rank": 4}, "three": {"rank": 3}, "sixteen": {"rank": 16}, "head": {"rank": 9, "tops": (HEAD,)}}
RUNS = ("", *ADAPTERS)


def server(*run_ids, **changes):
    """Knows the adapters of these runs only."""
    sampler = engine(tokenizer=ByteTokenizer(), **SIZES, **changes)
    for seed, (run_id, shape) in enumerate(ADAPTERS.items()):
        if run_id in run_ids:
            sampler.publish(run_id, 0, adapter(seed, 0.1, **shape), SCALE)
    return sampler


@pytest.fixture(scope="module")
def weights():
    """Merged weights by run."""
    found = {run_id: weights_of(seed, SCALE, size=0.1, **shape) for seed, (run_id, shape) in enumerate(ADAPTERS.items())}
    return {"": tiny()[1]} | found


def check_all(asked, completions, weights):
    """Each is the naive answer; hardly any draw was a near tie, so that ids are compared at nearly all."""
    num_ties = sum(check(one, completion, weights[one.run_id]) for one, completion in zip(asked, completions, strict=True))
    assert num_ties <= 3 + sum(len(completion.sampled_ids) for completion in completions) // 20


PARTS = {
    "all": {},
    "one": {"top_k": 1},
    "seven": {"top_k": 7, "temperature": 1.4},
    "more than there are": {"top_k": 10_000, "temperature": 0.8},
    "nucleus": {"top_p": 0.8},
    "tiny nucleus": {"top_p": 1e-6},
    "both": {"top_k": 20, "top_p": 0.6, "temperature": 2.0},
    "greedy": {"temperature": 0.0},
    "greedy and constrained": {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    "hot": {"temperature": 3.0},
}


def test_draws_of_every_kind_and_adapter_side_by_side_are_the_naive_ones(weights):
    """Cases 19 and 20: at every temperature the log-probabilities are log_softmax(logits / T), whatever part is drawn from."""
    asked = [
        request(prompt(3 + 4 * n, seed=n), run=run_id, tenant=run_id, max_tokens=16, seed=2**33 + n, sample_index=n % 3, num_top=n % 4, **part)
        for n, (part, run_id) in enumerate((part, run_id) for part in PARTS.values() for run_id in RUNS[:: 1 + len(part)])
    ]
    completions = run(server(*ADAPTERS), *asked)
    check_all(asked, completions, weights)
    for one, completion in zip(asked, completions, strict=True):
        assert completion.is_trainable == (one.params.temperature > 0 and not one.params.top_k and one.params.top_p == 1.0), "case 21"
    for one, completion in zip(asked, completions, strict=True):
        if one.params.top_k == 1 or one.params.top_p < 1e-3:
            check(request(one.prompt_ids, run=one.run_id, temperature=0.0, max_tokens=16, num_top=one.num_top), completion, weights[one.run_id])


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 9), st.floats(0.01, 1.0), st.floats(0.2, 3.0), st.booleans())
def test_the_naive_draw_tells_near_ties_from_all_else(seed, top_k, top_p, temperature, has_ties):
    """So that the tests here can fail: without slack one id is possible, with it few, and a draw from shifted logits is another."""
    rng = np.random.default_rng(seed)
    logits_V = rng.integers(-2, 3, 260).astype(float) if has_ties else rng.normal(0, 2, 260)
    params = SamplingParams(1, temperature, seed=seed, top_k=top_k, top_p=top_p)
    (drawn,) = possible(logits_V, params, 5, slack=0.0)
    assert drawn in possible(logits_V, params, 5)
    assert len(possible(logits_V, params, 5)) <= 3 or has_ties
    order = np.lexsort((np.arange(260), -logits_V))
    assert drawn in order[: top_k or 260]
    without = logits_V.copy()
    without[drawn] -= 100.0
    assert drawn not in possible(without, params, 5) or top_k == 1


@pytest.mark.parametrize("host_mib", [0, 1])
def test_prompt_logprobs_and_most_likely_ids_are_the_naive_ones(weights, host_mib):
    """Prompts of one id, of whole pages and chunks and one more, longer than a dispatch; with pages shared with others, and too few of them."""
    sampler = server(*ADAPTERS, host_mib=host_mib)
    lengths = (1, 2, 16, 17, 32, 33, 34, 97, 161, 200)
    stem = prompt(200, seed=99)
    asked = [
        request(
            stem[:length] if n % 2 else prompt(length, seed=n),
            run=RUNS[n % 5],
            tenant=RUNS[n % 3],
            max_tokens=56,
            seed=n,
            temperature=0.7,
            wants_prompt=n % 3 > 0,
            num_top=(0, 5, MAX_TOP)[n % 3],
        )
        for n, length in enumerate(lengths * 3)
    ]
    check_all(asked, run(sampler, *asked), weights)
    assert sampler._scheduler.counts.num_preempted > 0
    assert sampler.num_held_pages == 0


@pytest.mark.parametrize("host_mib", [0, 4])
def test_sixteen_episodes_of_long_context_in_a_quarter_of_the_pages_they_need_all_end_with_the_right_tokens(weights, host_mib):
    """Three turns each, up to 250 positions in 16 pages: 64 pages for 256."""
    sampler = server(*ADAPTERS, host_mib=host_mib)
    ids = [prompt(58, seed=100 + n) for n in range(16)]
    for turn in range(3):
        options = [{"run": RUNS[n % 5], "tenant": f"t{n % 3}", "episode": f"e{n}", "sample_index": n, "num_top": n % 2} for n in range(16)]
        asked = [request(ids[n], max_tokens=24, seed=turn, **options[n]) for n in range(16)]
        completions = run(sampler, *asked)
        check_all(asked, completions, weights)
        ids = [one.prompt_ids + c.sampled_ids + prompt(57, seed=n) for n, (one, c) in enumerate(zip(asked, completions, strict=True))]
    counts = sampler._scheduler.pool.counts
    assert sampler.num_held_pages == 0
    if host_mib:
        assert min(counts.num_stored, counts.num_loaded) > 50
        assert sampler.counts.num_prefilled <= sum(len(each) - 1 - 23 * 3 + 2 for each in ids), "nothing is computed twice"
    else:
        assert counts.num_evicted > 50


def test_with_recomputation_on_publish_every_token_is_of_its_version_alone(weights):
    """Case 47: publishes between dispatches abort nothing; each token's log-probability is that of its version over all ids before it."""
    sampler = server(*ADAPTERS, kv_on_publish="recompute")
    by_version = []

    def publish(step):
        if step % 5 == 0 and len(by_version) < 12:
            sampler.publish("moving", len(by_version), adapter(len(by_version), 0.2), SCALE)
            by_version.append(weights_of(len(by_version), SCALE, size=0.2))

    publish(0)
    asked = [
        request(prompt(length, seed=length), run="moving", episode=f"e{length}", max_tokens=60, seed=length, num_top=2)
        for length in (1, 2, 18, 40, 100, 150, 180)
    ]
    pinned = request(prompt(30), run="moving", version=0, max_tokens=60)
    other = request(prompt(30), run="four", max_tokens=60)
    *completions, kept, beside = run(sampler, *asked, pinned, other, between=lambda step: publish(step) if step else None)
    num_ties = 0
    for one, completion in zip(asked, completions, strict=True):
        assert list(completion.versions) == sorted(completion.versions)
        num_ties += check(one, completion, [by_version[version] for version in completion.versions])
    assert num_ties < 15
    assert len({version for completion in completions for version in completion.versions}) > 5
    longest = max(completions, key=lambda completion: len(completion.sampled_ids))
    logits_TV = logits_of(by_version[0], asked[completions.index(longest)].prompt_ids + longest.sampled_ids)
    assert np.abs(logits_TV - logits_of(by_version[1], asked[completions.index(longest)].prompt_ids + longest.sampled_ids)).max() > 100 * TIE
    assert set(kept.versions) == {0}
    check(pinned, kept, by_version[0])
    check(other, beside, weights["four"])
    assert (sampler.counts.num_mixed, sampler.num_held_pages) == (0, 0)


# Bits


KINDS = (
    {},
    {"temperature": 0.0},
    {"top_k": 5, "temperature": 1.4},
    {"top_p": 0.7},
    {"top_k": 1},
    {"num_top": MAX_TOP},
    {"wants_prompt": True, "num_top": 3},
    {"stop": ("e", "ab"), "stop_ids": (100,)},
)


def mine():
    """Three members of a group with a long prompt for each run and kind, and short ones between."""
    for number, kind in enumerate(KINDS):
        run_id = RUNS[number % 5]
        for member in range(3):
            ids = prompt(210, seed=number % 4) if member else prompt(1 + 9 * number, seed=50 + number)
            yield request(ids, run=run_id, max_tokens=20, seed=number, sample_index=member, **kind)


def fresh(one):
    """The same request under a new id."""
    return replace(one, request_id=request().request_id)


class Crowd:
    """Requests of all kinds, whole or as streams, some cancelled; and a run that publishes, now in one class of ranks, now in the other."""

    def __init__(self, sampler, seed):
        self.sampler, self.rng, self.version = sampler, random.Random(seed), 0
        self.publish(0)

    def publish(self, step):
        if step % 3 == 0:
            self.sampler.publish("moving", self.version, adapter(self.version % 5, 0.2, rank=(4, 12)[self.version % 2]), 1.0)
            self.version += 1

    async def one(self, run_ids):
        rng = self.rng
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        ids = (9, *prompt(rng.randrange(1, 100), seed=1000 + rng.randrange(9)))
        if rng.random() < 0.4:
            ids = prompt(210, seed=rng.randrange(4)) + ids[: rng.randrange(20)]
        asked = request(
            ids,
            run=rng.choice(("moving", "moving", *run_ids)),
            tenant=rng.choice("tuv"),
            episode=rng.choice(("", "e1", "e2")),
            max_tokens=rng.randrange(1, 24),
            seed=rng.randrange(2**40),
            **rng.choice(KINDS),
        )
        task = asyncio.ensure_future(self.read(asked) if rng.random() < 0.3 else self.sampler.sample(asked))
        if rng.random() < 0.2:
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])

    async def read(self, asked):
        async for _ in self.sampler.stream(asked):
            pass


def beside_a_crowd(sampler, asked, seed, run_ids, number=30):
    """What requests that come at random moments are answered with."""
    crowd = Crowd(sampler, seed)

    async def late(one):
        for _ in range(crowd.rng.randrange(40)):
            await asyncio.sleep(0)
        return await sampler.sample(one)

    async def main():
        others = [crowd.one(run_ids) for _ in range(number)]
        return (await drive(sampler, *(late(one) for one in asked), *others, between=crowd.publish))[: len(asked)]

    return asyncio.run(main())


def test_seeded_requests_have_the_same_bits_alone_and_beside_any_neighbours():
    """Alone: in an empty sampler that knows no other adapter. Beside: others of other ranks, constrained, scored, stopped, published and cancelled,
    with prefixes in common that are read once for all, and in the cache; so many that all are preempted, and stored in host memory meanwhile.

    No other request ends its prompt within one of these: the K/V of a prompt's last id are computed by decoding, which is another shape.
    """
    asked = list(mine())
    alone = [run(server(one.run_id), fresh(one))[0] for one in asked]
    assert len({completion.sampled_ids for completion in alone}) > len(asked) // 2
    for seed in range(2):
        sampler = server(*ADAPTERS, host_mib=8)
        found = beside_a_crowd(sampler, [fresh(one) for one in asked], seed, RUNS)
        for one, left, right in zip(asked, found, alone, strict=True):
            assert left == right, (one.run_id, len(one.prompt_ids), one.params)
        assert sampler.counts.num_slot_writes > 5
        counts = sampler._scheduler.counts
        assert counts.num_preempted > 0
        assert sampler._scheduler.pool.counts.num_loaded > 0
        assert (counts.num_recomputed, sampler.num_held_pages) == (0, 0)


def test_a_deterministic_run_has_the_same_bits_beside_requests_of_every_kind():
    """While pages are so short that others are preempted and stored."""
    expected = None
    for seed in (None, 0, 1):
        sampler = server("four", "sixteen", host_mib=1)
        sampler.set_deterministic("four", is_deterministic=True)
        asked = [request(prompt(20 + 11 * n, seed=n % 3), run="four", max_tokens=16, seed=n, **KINDS[n]) for n in range(8)]
        answers = run(sampler, *asked) if seed is None else beside_a_crowd(sampler, asked, seed, ("", "sixteen"))
        expected = expected or answers
        assert answers == expected
        assert sampler._scheduler.pool.counts.num_evicted > 20 or seed is None
