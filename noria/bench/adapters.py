"""`noria bench adapters`: many runs of a learner in one stream against the same runs one after another, and what 32 slots cost beside gradients.

    fused        32 runs' `Learner.train` submitted at once, then work until all are done
    sequential   the same on the same learner, the next run's submitted when the last one's step is done

`overhead_32_slots` is all of a fused step but its passes, over the whole step: the passes are the learner's own spans of score and pull, less what
scoring has beside its program (packing, uploads, losses, copies of outputs; done again by itself and timed). So these count, and so do the optimizer,
planning, and the copies of 32 states to the host. `save_share` and `optimizer_share`: 32 saves and 32 optimizer steps by themselves, over the step.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.executors import LORA, beside_passes
from noria.bench.harness import REPEATS, Bar, Report, Result, alternate, seconds_of
from noria.bench.learners import add_runs, drain, make_learner, passes
from noria.bench.trees import sequences
from noria.clock import RealClock
from noria.config import LearnerConfig
from noria.learner.batches import Costs, PlannedBatch
from noria.learner.learner import Learner
from noria.learner.step import counts_tiles
from noria.model.config import ModelConfig
from noria.model.weights import LoadedBase
from noria.observe import SpanRecorder
from noria.rl.packing import MicrobatchPlan, shapes_up_to

NUM_RUNS: Final = 32
TOKENS: Final = (64, 256)
MAX_POSITIONS: Final = 2048
AT_LEAST: Final = {64: 1.3, 256: 0.95}
OVERHEAD: Final = 0.05


def measure(*, quick: bool = False, repeats: int = REPEATS) -> Report:
    """Everything. quick: four runs on the tiny base, said in the result."""
    loaded = base_of("tiny" if quick else "smollm2-135m")
    values = measure_on(loaded, repeats, num_runs=4 if quick else NUM_RUNS)
    return Report("adapters", loaded.config.name, values, bars_of(values), quick)


def measure_on(loaded: LoadedBase, repeats: int, dtype: npt.DTypeLike = np.float32, *, num_runs: int = NUM_RUNS) -> Result:
    """The values, on any base."""
    settings = LearnerConfig(max_positions=MAX_POSITIONS, num_slots=num_runs, rank_classes=(LORA.rank,))
    spans = SpanRecorder(RealClock())
    learner = make_learner(loaded, settings, dtype=dtype, spans=spans)
    run_ids = [str(number) for number in range(num_runs)]
    add_runs(learner, loaded, dict.fromkeys(run_ids, LORA.rank))
    fused: dict[str, float] = {}
    for tokens in TOKENS:
        batches = {run_id: batch(learner, loaded.config, tokens, seed) for seed, run_id in enumerate(run_ids)}
        works: dict[str, Callable[[], object]] = {"fused": partial(fused_step, learner, batches), "sequential": partial(in_turn, learner, batches)}
        for work in works.values():
            work()
        fused[str(tokens)] = alternate(works, repeats=repeats).ratio("sequential", "fused")
    return {"fused_over_sequential": fused, **shares(learner, loaded.config, spans, batches, repeats)}


def shares(learner: Learner, config: ModelConfig, spans: SpanRecorder, batches: Mapping[str, PlannedBatch], repeats: int) -> Result:
    """What a fused step of these batches is made of: medians of its parts over the whole step."""
    works: dict[str, Callable[[], None]] = {
        "beside": partial(beside_passes, plans_of(config, batches), len(batches)),
        "saves": lambda: finish(learner, [learner.save(run_id) for run_id in batches]),
        "optimizer": lambda: finish(learner, [learner.optim_step(run_id) for run_id in batches]),
    }
    for work in works.values():
        work()
    found: dict[str, list[float]] = {"overhead": [], "saves": [], "optimizer": []}
    for _ in range(repeats):
        before = pass_seconds(spans)
        step_s = seconds_of(partial(fused_step, learner, batches))
        in_spans_s, alone_s = pass_seconds(spans) - before, {name: seconds_of(work) for name, work in works.items()}
        found["overhead"].append(1 - (in_spans_s - alone_s["beside"]) / step_s)
        for name in ("saves", "optimizer"):
            found[name].append(alone_s[name] / step_s)
    return {
        "overhead_32_slots": median(found["overhead"]),
        "save_share": median(found["saves"]),
        "optimizer_share": median(found["optimizer"]),
    }


def pass_seconds(spans: SpanRecorder) -> float:
    """Seconds of all score and pull spans so far."""
    return sum(total.total_s for total in spans.snapshot() if total.name in ("score", "pull"))


def batch(learner: Learner, config: ModelConfig, tokens: int, seed: int) -> PlannedBatch:
    """One run's batch: a sequence of `tokens` ids, the last quarter trained."""
    return learner.planner.plan(sequences(config.vocab_size, lengths=[tokens], entries_each=tokens // 4, seed=seed))


def fused_step(learner: Learner, batches: Mapping[str, PlannedBatch]) -> None:
    """All runs' step in one stream."""
    finish(learner, [learner.train(run_id, planned) for run_id, planned in batches.items()])


def in_turn(learner: Learner, batches: Mapping[str, PlannedBatch]) -> None:
    """The same steps, run after run."""
    for run_id, planned in batches.items():
        finish(learner, [learner.train(run_id, planned)])


def finish(learner: Learner, futures: Sequence["Future[Any]"]) -> None:
    """Work until all is done. Raises what any of it failed with."""
    drain(learner)
    for future in futures:
        future.result(0)


def plans_of(config: ModelConfig, batches: Mapping[str, PlannedBatch]) -> list[MicrobatchPlan]:
    """The passes of a fused step."""
    shapes = shapes_up_to(MAX_POSITIONS, is_counted=counts_tiles())
    return list(passes({run_id: iter([planned]) for run_id, planned in batches.items()}, shapes, Costs(config)))


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks of these numbers."""
    fused = values["fused_over_sequential"]
    return (
        *(Bar(f"fused_over_sequential_{tokens}", fused[str(tokens)], at_least=bound) for tokens, bound in AT_LEAST.items()),
        Bar("overhead_32_slots", values["overhead_32_slots"], at_most=OVERHEAD),
    )


def table(report: Report) -> Table:
    """The measurement for people."""
    values, shown = report.values, Table("measured", "value", title=f"adapters, {report.base}")
    for tokens, value in values["fused_over_sequential"].items():
        shown.add_row(f"{NUM_RUNS} runs of {tokens} tokens, fused over sequential", f"{value:.2f}")
    shown.add_row("all but score and pull, of a step of 32 slots", f"{values['overhead_32_slots']:.3f}")
    shown.add_row("32 saves alone, of that step", f"{values['save_share']:.3f}")
    shown.add_row("32 optimizer steps alone, of that step", f"{values['optimizer_share']:.3f}")
    return shown
