"""The sampler's own cases: each takes a side that runs, and gives the values that it promises and a row for each workload.

    batches       1, 8, 32, 64 lanes and a group, adapters off; 32 lanes against their matrix products alone
    adapters      1, 4, 32 adapters of rank 8, then of rank 64, on the same lanes
    publish       one run with and without a publish every so many decode steps
    constrained   top-k and top-p on every lane against plain draws
    training      decoding alone and beside a learner on the same device
    long          episodes of several turns in a quarter of the pages that they need

What is compared takes turns; a value is the median over the pairs. Tokens/s count new tokens over the whole round, prefill included.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from noria.bench.bases import base_of
from noria.bench.ceiling import head_matmul, layer_matmuls
from noria.bench.harness import Result, Timings, alternate, seconds_of
from noria.bench.sampler_cases import FIRST_ID, Sizes, Workload
from noria.bench.sampler_side import MAX_STALL_S, TENANT, Side, Taken, serving
from noria.bench.trees import group
from noria.config import SamplerConfig
from noria.sampler.pages import PAGE
from noria.sampler.runner import Shapes
from noria.sampler.slots import BASE_RUN
from noria.types import Completion, Ids, SampleRequest, SamplingParams

CEILING_STEPS: Final = 16
"""Forward passes of matrix products alone, each time it is their turn."""

LONG_ANSWER: Final = 32
TOOL_S: Final = 0.05
"""How long a long episode waits for its tool between two turns."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case. values: under the promised names. rows: one for each workload, for `cases`."""

    values: Result
    rows: list[Result]


def batches(side: Side, sizes: Sizes, repeats: int) -> Outcome:
    """Adapters off. Lanes other than those of the ratio are taken half as often: nothing is compared with them."""
    lanes = sizes.batch32.num_lanes
    layers, head = layer_matmuls(side.base, lanes), head_matmul(side.base, side.config, lanes)
    takes: list[Taken] = []
    ceiling_s: list[float] = []

    def ceiling() -> None:
        for _ in range(CEILING_STEPS):
            layers()
            head()

    alternate(
        {
            "ours": lambda: takes.append(side.take(sizes.batch32)),
            "ceiling": lambda: ceiling_s.append(seconds_of(ceiling) / CEILING_STEPS),
        },
        repeats=repeats,
    )
    fractions = [alone / step_seconds(taken, lanes) for alone, taken in zip(ceiling_s, takes, strict=True)]
    others = [workload for workload in (*sizes.batches, sizes.group) if workload is not sizes.batch32]
    _, taken = rounds(side, others, max(1, repeats // 2))
    rows = [row(workload, taken[workload.name]) for workload in others]
    own = {**row(sizes.batch32, takes), "step_ms": 1e3 * statistics.median(step_seconds(one, lanes) for one in takes)}
    own["matmuls_ms"] = 1e3 * statistics.median(ceiling_s)
    return Outcome({"fraction_of_matmuls_batch32": statistics.median(fractions)}, [own, *rows])


def adapters(side: Side, sizes: Sizes, repeats: int) -> Outcome:
    """Rank after rank, since the slots are for one rank's at once; the promised value is that of the first."""
    rows, ratios = list[Result](), list[float]()
    for rank in dict.fromkeys(workload.rank for workload in sizes.adapters):
        workloads = [workload for workload in sizes.adapters if workload.rank == rank]
        timings, taken = rounds(side, workloads, repeats)
        one, most = workloads[0].name, workloads[-1].name
        ratios.append(timings.ratio(one, most))
        rows += [{**row(w, taken[w.name]), "over_1_adapter": timings.ratio(one, w.name)} for w in workloads]
    return Outcome({"adapters32_over_1": ratios[0]}, rows)


def publish(side: Side, sizes: Sizes, repeats: int) -> Outcome:
    """What it costs everybody that a run publishes: 1 - tokens/s with over tokens/s without."""
    workload, every = sizes.publishing, sizes.publish_every
    found: dict[str, list[Taken]] = {"without": [], "with": []}
    works = {
        "without": lambda: found["without"].append(side.take(workload)),
        "with": lambda: found["with"].append(side.take(workload, publish_every=every)),
    }
    side.load_adapters(workload)
    alternate(works, repeats=repeats)
    num_publishes = statistics.median(len({v for c in taken.completions for v in c.versions}) - 1 for taken in found["with"])
    rows = [{**row(workload, takes), "name": f"{workload.name}, {name}"} for name, takes in found.items()]
    rows[1] |= {"publishes": num_publishes, "publish_every": every}
    return Outcome({"publish_cost": 1 - _timings(found).ratio("without", "with")}, rows)


def constrained(side: Side, sizes: Sizes, repeats: int) -> Outcome:
    """Tokens/s with top-k and top-p on all lanes over plain draws."""
    workloads = [sizes.free, sizes.constrained]
    timings, taken = rounds(side, workloads, repeats)
    rows = [row(workload, taken[workload.name]) for workload in workloads]
    counts = [len(completion.sampled_ids) == sizes.constrained.answer for one in taken[sizes.constrained.name] for completion in one.completions]
    values = {"constrained_over_free": timings.ratio(sizes.free.name, sizes.constrained.name), "constrained_finished": sum(counts) / len(counts)}
    return Outcome(values, rows)


def training(side: Side, sizes: Sizes, repeats: int) -> Outcome:
    """The p95 of what a reader waits between two items, beside a learner that always has work, less that without."""
    assert side.learner is not None, "this side was made with a learner"
    workload, (prompt, answer, members) = sizes.beside_training, sizes.trained
    batch = side.learner.planner.plan(group(side.config.vocab_size, prompt=prompt, answer=answer, members=members))
    found: dict[str, list[Taken]] = {"solo": [], "training": []}
    works = {
        "solo": lambda: found["solo"].append(side.take(workload)),
        "training": lambda: found["training"].append(side.take_training(workload, batch)),
    }
    works["training"]()  # the learner learns what its passes take
    found["training"].clear()
    num_before = side.learner.num_microbatches
    alternate(works, repeats=repeats)
    more_ms = [1e3 * (beside - solo) for solo, beside in zip(*([p95(t.gaps_s) for t in found[name]] for name in found), strict=True)]
    rows = [{**row(workload, takes), "name": f"{workload.name}: {name}"} for name, takes in found.items()]
    rows[1] |= {"learner_passes": side.learner.num_microbatches - num_before, "max_stall_ms": 1e3 * MAX_STALL_S}
    rows[1] |= {"tokens_per_s_over_solo": _timings(found).ratio("solo", "training")}
    return Outcome({"inter_token_p95_training_minus_solo_ms": statistics.median(more_ms)}, rows)


def long(sizes: Sizes) -> Outcome:
    """On the tiny base, with an engine of its own: every episode waits for a tool between turns, and all of them are under way at once."""
    tiny, needed = base_of("tiny"), sizes.long_episodes * sizes.long_context // PAGE
    loaded = replace(tiny, config=replace(tiny.config, max_context=sizes.long_context))
    settings = SamplerConfig(
        num_lanes=-(-sizes.long_episodes // 8) * 8, num_pages=needed // 4, max_context=sizes.long_context, num_slots=2, steps_per_dispatch=8
    )
    side = Side(loaded, settings, dtype=np.float32, rank_classes=(8,), shapes=Shapes(lanes=(settings.num_lanes,), rows=(16,)))
    with serving(side):
        start = time.perf_counter()
        episodes = asyncio.run(_play_all(side, sizes))
        seconds = time.perf_counter() - start
    finished = sum(len(turns) == sizes.long_turns and all(len(turn.sampled_ids) == LONG_ANSWER for turn in turns) for turns in episodes)
    counts, prefilled = side.schedule_counts, side.sampler.counts.num_prefilled
    least = sizes.long_episodes * (sizes.long_context - sizes.long_turns * LONG_ANSWER)
    found: Result = {
        "name": f"{sizes.long_episodes} episodes of {sizes.long_context} positions",
        "episodes": sizes.long_episodes,
        "finished": finished,
        "pages": settings.num_pages,
        "pages_needed": needed,
        "seconds": seconds,
        "prefilled": prefilled,
        "prefilled_over_least": prefilled / least,
        "preempted": counts.num_preempted,
        "recomputed": counts.num_recomputed,
        "pages_stored": side.sampler.page_counts.num_stored,
        "pages_loaded": side.sampler.page_counts.num_loaded,
    }
    return Outcome({"long_episodes_finished": finished / sizes.long_episodes}, [found])


async def _play_all(side: Side, sizes: Sizes) -> list[list[Completion]]:
    return await asyncio.gather(*(_play(side, sizes, number) for number in range(sizes.long_episodes)))


async def _play(side: Side, sizes: Sizes, number: int) -> list[Completion]:
    """One episode: the same number of new ids before each turn, then a few sampled ones."""
    rng, turns = np.random.default_rng(number), list[Completion]()
    ids: Ids = ()
    observation = sizes.long_context // sizes.long_turns - LONG_ANSWER
    for turn in range(sizes.long_turns):
        ids += tuple(rng.integers(FIRST_ID, side.config.vocab_size, observation).tolist())
        params = SamplingParams(LONG_ANSWER, seed=number, sample_index=turn)
        turns.append(await side.sampler.sample(SampleRequest(f"long/{number}/{turn}", TENANT, BASE_RUN, f"long/{number}", ids, params)))
        ids += turns[-1].sampled_ids
        await asyncio.sleep(TOOL_S)
    return turns


def rounds(side: Side, workloads: Sequence[Workload], repeats: int) -> tuple[Timings, dict[str, list[Taken]]]:
    """All workloads by turns; their adapters are in slots before the first, so that no round brings them."""
    found: dict[str, list[Taken]] = {workload.name: [] for workload in workloads}
    for workload in workloads:
        side.load_adapters(workload)

    def work(workload: Workload) -> Callable[[], None]:
        return lambda: found[workload.name].append(side.take(workload))

    alternate({workload.name: work(workload) for workload in workloads}, repeats=repeats)
    return _timings(found), found


def row(workload: Workload, takes: Sequence[Taken]) -> Result:
    """One workload as it stands in a result: medians over its rounds, percentiles over all their samples."""
    first_s, gaps_s = ([x for taken in takes for x in taken.first_s], [x for taken in takes for x in taken.gaps_s])
    return {
        "name": workload.name,
        "lanes": workload.num_lanes,
        "prompts": workload.num_prompts,
        "prompt": workload.prompt,
        "answer": workload.answer,
        "adapters": workload.num_adapters,
        "rank": workload.rank if workload.num_adapters else None,
        "tokens_per_s": statistics.median(taken.num_tokens / taken.seconds for taken in takes),
        "first_token_p50_ms": 1e3 * statistics.median(first_s),
        "first_token_p95_ms": 1e3 * p95(first_s),
        "inter_token_p95_ms": 1e3 * p95(gaps_s),
        "prefix_hits": statistics.median(taken.num_found / max(1, taken.num_asked) for taken in takes),
        "finished": statistics.median(sum(len(c.sampled_ids) == workload.answer for c in taken.completions) for taken in takes),
    }


def step_seconds(taken: Taken, lanes: int) -> float:
    """Wall seconds of a decode step while all lanes decode, with what lies between dispatches."""
    full = [decode for decode in taken.decodes if decode.num_lanes == lanes]
    assert all(a.end_s <= b.start_s for a, b in pairwise(full)), "one dispatch at a time"
    return (full[-1].end_s - full[0].start_s) / sum(decode.num_steps for decode in full)


def p95(values: Sequence[float]) -> float:
    """The 95th percentile; 0 of nothing, as where one dispatch samples everything."""
    return float(np.percentile(values, 95)) if values else 0.0


def _timings(found: Mapping[str, Sequence[Taken]]) -> Timings:
    return Timings({name: tuple(taken.seconds for taken in takes) for name, takes in found.items()})
