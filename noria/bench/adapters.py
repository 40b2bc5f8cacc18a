"""`noria bench adapters`: many runs in one stream against the same runs one after another, and what 32 slots cost beside the gradients.

    fused        the runs' pieces share passes of up to 2,048 positions; then each run's optimizer step
    sequential   each run alone: its own pass on the smallest axis that holds it, its own optimizer step, on a server with one slot

Sequential has the smaller accumulators, so nothing is won by making the other side carry 32 slots. `overhead_32_slots` is all that is not score, loss
or pull (32 optimizer steps, planning, packing, transfers) over the whole step. The base is cut to its first layers, as its name says.
"""

import time
from collections.abc import Callable
from typing import Final

import jax
import numpy as np
import numpy.typing as npt
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.executors import Subject, make_subject, microbatches_of, optimizer_step, pass_gradient, upload
from noria.bench.harness import REPEATS, Bar, Report, Result, alternate
from noria.bench.trees import sequences
from noria.model.config import ModelConfig
from noria.model.weights import LoadedBase
from noria.rl.packing import cut, microbatch_shape, pack, shapes_up_to
from noria.types import Piece

NUM_RUNS: Final = 32
TOKENS: Final = (64, 256)
MAX_POSITIONS: Final = 2048
NUM_LAYERS: Final = 8
AT_LEAST: Final = {64: 1.3, 256: 0.95}
OVERHEAD: Final = 0.05


def measure(*, quick: bool = False, repeats: int = REPEATS) -> Report:
    """Everything. quick: the tiny base, said in the result."""
    loaded = base_of("tiny") if quick else base_of("smollm2-135m", NUM_LAYERS)
    values = measure_on(loaded, repeats)
    return Report("adapters", loaded.config.name, values, bars_of(values), quick)


def measure_on(loaded: LoadedBase, repeats: int, dtype: npt.DTypeLike = np.float32) -> Result:
    """The values, on any base."""
    many, one = make_subject(loaded, num_slots=NUM_RUNS, dtype=dtype), make_subject(loaded, dtype=dtype)
    fused: dict[str, float] = {}
    overhead = 0.0
    for tokens in TOKENS:
        batches = [batch(loaded.config, tokens, seed) for seed in range(NUM_RUNS)]
        works: dict[str, Callable[[], object]] = {"fused": fused_work(many, batches), "sequential": sequential_work(one, batches)}
        for work in works.values():
            work()
        fused[str(tokens)] = alternate(works, repeats=repeats).ratio("sequential", "fused")
        if tokens == TOKENS[-1]:
            overhead = overhead_of(many, batches, repeats)
    return {"fused_over_sequential": fused, "overhead_32_slots": overhead}


def batch(config: ModelConfig, tokens: int, seed: int) -> tuple[Piece, ...]:
    """One run's batch: a sequence of `tokens` ids, the last quarter trained."""
    return cut(sequences(config.vocab_size, lengths=[tokens], entries_each=tokens // 4, seed=seed), microbatch_shape(MAX_POSITIONS))


def fused_work(subject: Subject, batches: list[tuple[Piece, ...]]) -> Callable[[], None]:
    """All runs' step in one stream."""
    shapes = shapes_up_to(MAX_POSITIONS)

    def step() -> None:
        gradient = subject.state.gradient
        for plan in microbatches_of(list(enumerate(batches)), shapes):
            gradient = pass_gradient(subject, upload(pack(plan)), gradient)
        for slot in range(len(batches)):
            optimizer_step(subject, slot, gradient)
            gradient = subject.state.gradient

    return step


def sequential_work(subject: Subject, batches: list[tuple[Piece, ...]]) -> Callable[[], None]:
    """The same steps by our own one-run path, run after run."""
    shapes = shapes_up_to(MAX_POSITIONS)

    def step() -> None:
        gradient = subject.state.gradient
        for pieces in batches:
            for plan in microbatches_of([(0, pieces)], shapes):
                gradient = pass_gradient(subject, upload(pack(plan)), gradient)
            optimizer_step(subject, 0, gradient)
            gradient = subject.state.gradient

    return step


def overhead_of(subject: Subject, batches: list[tuple[Piece, ...]], repeats: int) -> float:
    """Median share of a fused step that is not score, loss or pull."""
    shapes, shares = shapes_up_to(MAX_POSITIONS), []
    for _ in range(repeats):
        gradient = subject.state.gradient
        start, inside = time.perf_counter(), 0.0
        for plan in microbatches_of(list(enumerate(batches)), shapes):
            uploaded = upload(pack(plan))
            began = time.perf_counter()
            gradient = jax.block_until_ready(pass_gradient(subject, uploaded, gradient))
            inside += time.perf_counter() - began
        for slot in range(len(batches)):
            optimizer_step(subject, slot, gradient)
            gradient = subject.state.gradient
        shares.append(1 - inside / (time.perf_counter() - start))
    return sorted(shares)[len(shares) // 2]


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks of these numbers."""
    fused = values["fused_over_sequential"]
    return (
        *(Bar(f"fused_over_sequential_{tokens}", fused[str(tokens)], at_least=bound) for tokens, bound in AT_LEAST.items()),
        Bar("overhead_32_slots", values["overhead_32_slots"], at_most=OVERHEAD),
    )


def table(report: Report) -> Table:
    """The measurement for people."""
    shown = Table("measured", "value", title=f"adapters, {report.base}")
    for tokens, value in report.values["fused_over_sequential"].items():
        shown.add_row(f"{NUM_RUNS} runs of {tokens} tokens, fused over sequential", f"{value:.2f}")
    shown.add_row("optimizer and dispatch of a step of 32 slots", f"{report.values['overhead_32_slots']:.3f}")
    return shown
