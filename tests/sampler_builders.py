"""Builders of the sampler's tests: a tiny base, engines, requests, adapters, and naive references."""

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import jax
import numpy as np

from noria.config import SamplerConfig
from noria.model.config import ModelConfig
from noria.model.lora import HEAD, HostAdapter, host_shapes
from noria.model.placement import BaseParams, place
from noria.model.transformer import forward_logits
from noria.model.weights import Params, load_base
from noria.protocols import Clock, Tokenizer
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.sampler.slots import BASE_RUN
from noria.types import Completion, Ids, SampleRequest, SamplingParams

RANK = 4
SHAPES = Shapes(lanes=(16,), rows=(4,))


class NoSpans:
    """Satisfies `protocols.Spans` and remembers which spans were opened."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []

    def span(self, stage: str, name: str, run_id: str = "", *, is_wait: bool = False) -> AbstractContextManager[None]:
        self.names.append((stage, name))
        return nullcontext()


@cache
def tiny() -> tuple[ModelConfig, Params, BaseParams]:
    """The tiny base: configuration, host weights, placed weights."""
    loaded = load_base("tiny")
    return loaded.config, loaded.params, place(loaded.params)


def config(**changes: Any) -> SamplerConfig:
    return SamplerConfig(**({"num_lanes": 16, "num_pages": 256, "max_context": 256, "steps_per_dispatch": 4, "num_slots": 8} | changes))


def engine(
    *,
    base: BaseParams | None = None,
    eos_id: int = 2,
    shapes: Shapes = SHAPES,
    spans: NoSpans | None = None,
    rank_classes: tuple[int, ...] = (RANK,),
    clock: Clock | None = None,
    tokenizer: Tokenizer | None = None,
    **changes: Any,
) -> SamplerEngine:
    model, _, placed = tiny()
    return SamplerEngine(
        base or placed,
        model,
        config(**changes),
        rank_classes=rank_classes,
        eos_id=eos_id,
        spans=spans or NoSpans(),
        clock=clock,
        tokenizer=tokenizer,
        shapes=shapes,
    )


_numbers = iter(range(10**9))


_OF_REQUEST = ("num_top", "wants_prompt", "timeout_s")


def request(
    prompt: Ids = (5, 6, 7), *, run: str = BASE_RUN, tenant: str = "t", version: int | None = None, episode: str = "", **params: Any
) -> SampleRequest:
    """params: of `SamplingParams`, and the rest of `SampleRequest`."""
    asked = {name: params.pop(name) for name in _OF_REQUEST if name in params}
    sampling = SamplingParams(**({"max_tokens": 8, "seed": 1} | params))
    return SampleRequest(f"r{next(_numbers)}", tenant, run, episode, prompt, sampling, version, **asked)


def prompt(length: int, seed: int = 0) -> Ids:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(10, 250, length))


def adapter(seed: int, size: float = 0.3, *, rank: int = RANK, tops: tuple[str, ...] = ()) -> HostAdapter:
    """A random adapter, large enough to change what is sampled."""
    rng, shapes = np.random.default_rng(seed), host_shapes(tiny()[0], rank, tops)
    a, b = {}, {}
    for name in shapes["a"]:
        a[name] = rng.normal(0, shapes["a"][name][1] ** -0.5, shapes["a"][name]).astype(np.float32)
        b[name] = rng.normal(0, size, shapes["b"][name]).astype(np.float32)
    return {"a": a, "b": b}


def merged(params: Mapping[str, Any], weights: HostAdapter, scale: float) -> Params:
    """Weights with the adapter folded in: the reference for adapters applied at use."""
    layers = {name: w + scale * weights["a"][name] @ weights["b"][name] if name in weights["a"] else w for name, w in params["layers"].items()}
    if HEAD not in weights["a"]:
        return {**params, "layers": layers}
    head = params.get(HEAD, params["embed"]) + scale * (weights["a"][HEAD][0] @ weights["b"][HEAD][0]).T
    return {**params, "layers": layers, HEAD: head}


def reference_logprobs(params: Mapping[str, Any], prompt_ids: Ids, completion: Completion, temperature: float) -> list[float]:
    """Log-probabilities of a completion by one full forward pass."""
    ids = prompt_ids + completion.sampled_ids
    logits_TV = np.asarray(forward_logits(jax.tree.map(np.asarray, params), tiny()[0], np.asarray(ids, np.int32))) / (temperature or 1.0)
    logprobs_TV = np.asarray(jax.nn.log_softmax(logits_TV, axis=-1))
    first = len(prompt_ids) - 1
    return [float(logprobs_TV[first + n, token]) for n, token in enumerate(completion.sampled_ids)]


def run(sampler: SamplerEngine, *requests: SampleRequest, between: Any = None) -> list[Completion]:
    """All requests at once, on one thread: event loop and device steps in turn. between: called with the step's number before each step."""

    async def sample_all() -> list[Completion]:
        return await drive(sampler, *(sampler.sample(r) for r in requests), between=between)

    return asyncio.run(sample_all())


async def drive(sampler: SamplerEngine, *work: Coroutine[Any, Any, Any], between: Any = None) -> list[Any]:
    """Await the coroutines while stepping the engine."""
    tasks = [asyncio.ensure_future(one) for one in work]
    step = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if between is not None:
            between(step)
        sampler.step()
        step += 1
    return await asyncio.gather(*tasks)
