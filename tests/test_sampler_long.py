"""A prompt of 16k ids on the device itself: others sample on, bit for bit as without it, and what follows it is what a full forward pass says."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from naive_sampler import check
from sampler_builders import NoSpans, config, prompt, request, tiny

from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes

CONTEXT = 16_448


def server():
    model, _, base = tiny()
    settings = config(num_pages=1200, max_context=CONTEXT)
    shapes = Shapes(lanes=(8,), rows=(16,))
    return SamplerEngine(base, replace(model, max_context=CONTEXT), settings, rank_classes=(4,), eos_id=2, spans=NoSpans(), shapes=shapes)


def answers(sampler, watched, *others):
    """All completions, and for each of the watched the steps in which it was sampled."""
    steps = [[] for _ in watched]

    async def read(number, one):
        async for item in sampler.stream(one):
            steps[number].append(now)
            completion = item.completion
        return completion

    async def main():
        nonlocal now
        tasks = [asyncio.ensure_future(read(number, one)) for number, one in enumerate(watched)]
        tasks += [asyncio.ensure_future(sampler.sample(one)) for one in others]
        while not all(task.done() for task in tasks):
            sampler.step()
            now += 1
            for _ in range(3):
                await asyncio.sleep(0)
        return [task.result() for task in tasks]

    now = 0
    return asyncio.run(main()), steps


@pytest.mark.prove
def test_a_prompt_of_16k_stalls_no_one_and_is_answered_as_by_a_full_forward_pass():
    def watched():
        return [request(prompt(20, seed=n), max_tokens=180, seed=n, top_k=240) for n in range(3)]

    expected, _ = answers(server(), watched())
    long = request(prompt(16_384), max_tokens=8, tenant="l", num_top=3)
    sampler = server()
    (*found, answer), steps = answers(sampler, watched(), long)
    assert found == expected
    assert sampler.counts.num_prefills >= 16_384 // (16 * 32)
    assert all(later - earlier <= 2 for each in steps for earlier, later in pairwise(each))
    assert max(len(each) for each in steps) > 16
    assert check(long, answer, tiny()[1], context=CONTEXT) < 3
