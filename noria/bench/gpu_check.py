"""What a GPU has to show, in at most four minutes: `scripts/gpu_check.sh` runs it. Without one it runs at tiny sizes, which shows that it runs.

    parity      both executors' gradients against rows without sharing, float32
    kernel      the sampler's kernel over pages against our own loops, float32 and the dtype of the base: difference and speedup
    replay      a prompt of 16k, answers of 64 to 4k, G 8 and 16: the walk over the tree against its rows, each in a packed pass of its own; where the
                memory has no room for that, each on the same walk: `baseline` says which
    largest     the longest exact and stop prefix of a 0.6B shape that fits: computed from the compiler's figures, then one visit at its end is run
    adapters    as `noria bench adapters`

A row is timed once and counted G times, since rows of one group are alike. Every part is written as soon as it is done, and what would begin
after the time is up is named in `skipped`: nothing is left out silently.
"""

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from noria.bench import adapters, kernels
from noria.bench.bases import base_of, shape_of_06b
from noria.bench.executors import (
    LORA,
    Subject,
    make_subject,
    packed_axis,
    packed_gradient,
    relative_l2,
    replay_gradient,
    visit_at_the_end,
    visit_peak,
)
from noria.bench.flops import training_flops
from noria.bench.harness import Report, Result, alternate
from noria.bench.memory import tree_bytes
from noria.bench.trees import group, sequences, unshared
from noria.learner.memory import device_bytes, packed_bytes
from noria.model.attention import SPAN
from noria.model.placement import base_dtype
from noria.model.weights import LoadedBase
from noria.rl.chunks import PrefixGradient
from noria.rl.packing import microbatch_shape
from noria.types import TILE

BUDGET_S: Final = 210.0
"""No part begins later; the longest takes less than what is left of four minutes."""

REPEATS: Final = 3

MARGIN: Final = 0.95
"""Of the device's memory: what a longest prefix may fill, since allocators round up."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """bases: of parity and replay, and of the longest prefix. groups: (P, R, G) in the order of their worth. chunk: of a walk. lanes: of the kernel's
    comparison."""

    base: LoadedBase
    largest_base: LoadedBase
    parity: tuple[int, int, int]
    groups: tuple[tuple[int, int, int], ...]
    chunk: int
    limit_bytes: int
    lanes: Mapping[str, int]


@dataclass(slots=True)
class Progress:
    """The result as it grows, and its file. started_s: of the monotonic clock."""

    path: Path
    result: Result
    started_s: float = field(default_factory=time.monotonic)

    def part(self, name: str, measure: Callable[[], Result]) -> None:
        """Measure a part, unless the time is up; write all there is."""
        if time.monotonic() - self.started_s > BUDGET_S:
            self.result["skipped"].append(name)
        else:
            began = time.monotonic()
            self.result["parts"][name] = measure() | {"seconds": time.monotonic() - began}
        self.path.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")


def sizes() -> Sizes:
    """Those of this machine."""
    if jax.default_backend() == "cpu":
        tiny = base_of("tiny")
        return Sizes(tiny, tiny, (192, 8, 4), ((256, 8, 4), (256, 32, 8)), 128, 64 * 2**20, {"num_lanes": 8, "num_pages": 8})
    groups = tuple((16_384, answer, members) for answer in (64, 4096, 1024) for members in (8, 16))
    return Sizes(shape_of_06b(4), shape_of_06b(), (1024, 64, 8), groups, 2048, device_bytes(), {"num_lanes": 64, "num_pages": 128})


def measure(path: Path) -> Result:
    """All parts, written to `path` one by one."""
    sized, is_quick = sizes(), jax.default_backend() == "cpu"
    about = Report("gpu_check", sized.base.config.name, {}, (), is_quick, {"date": str(datetime.datetime.now(tz=datetime.UTC).date())}).as_json()
    progress = Progress(path, {**about, "parts": {}, "skipped": []})
    progress.part("parity", lambda: parity(sized))
    heads = sized.base.config.num_heads, sized.base.config.num_kv_heads, sized.base.config.head_dim
    for dtype in dict.fromkeys((jnp.dtype(jnp.float32), jnp.dtype(dtype_here()))):
        progress.part(f"kernel {dtype.name}", partial(kernels.compare, heads, dtype, **sized.lanes))
    num_runs = 4 if is_quick else adapters.NUM_RUNS
    progress.part("adapters", lambda: adapters.measure_on(sized.base, REPEATS, dtype_here(), num_runs=num_runs))
    modes: tuple[PrefixGradient, ...] = ("exact", "stop")
    for mode in modes:
        progress.part(f"largest {mode} prefix", partial(largest, sized, mode))
    for prompt, answer, members in sized.groups:
        progress.part(f"replay P {prompt} R {answer} G {members}", partial(replayed, sized, (prompt, answer, members)))
    return progress.result


def parity(sized: Sizes) -> Result:
    """Relative L2 distance of each executor's gradient to that of rows without sharing, float32."""
    prompt, answer, members = sized.parity
    subject = make_subject(sized.base)
    tree = group(sized.base.config.vocab_size, prompt=prompt, answer=answer, members=members)
    rows = unshared(tree)
    want = packed_gradient(subject, rows, packed_axis(rows) // members // TILE * TILE + TILE)
    packed, walked = packed_gradient(subject, tree, packed_axis(tree)), replay_gradient(subject, tree, min(sized.chunk, 512))
    return {"packed": relative_l2(packed, want), "replay": relative_l2(walked, want)}


def replayed(sized: Sizes, size: tuple[int, int, int]) -> Result:
    """The walk over a group's tree against one of its rows, counted for all: packed if that fits in memory, else on the same walk."""
    prompt, answer, members = size
    config = sized.base.config
    subject = make_subject(sized.base, dtype=dtype_here())
    tree = group(config.vocab_size, prompt=prompt, answer=answer, members=members)
    rows, row = unshared(tree), sequences(config.vocab_size, lengths=[prompt + answer - 1], entries_each=answer)
    is_packed = has_room_for_rows(sized, subject, packed_axis(row))
    works: dict[str, Callable[[], object]] = {
        "tree": lambda: replay_gradient(subject, tree, sized.chunk),
        "row": lambda: packed_gradient(subject, row, packed_axis(row)) if is_packed else replay_gradient(subject, row, sized.chunk),
    }
    for work in works.values():
        work()
    timings = alternate(works, repeats=REPEATS)
    flop_ratio = training_flops(rows, config, LORA.rank) / training_flops(tree, config, LORA.rank)
    return {
        "baseline": "packed rows" if is_packed else "rows on the walk: packed ones do not fit",
        "speedup": timings.ratio("row", "tree") * members,
        "rho": len(rows) / len(tree),
        "flop_ratio": flop_ratio,
        "row_positions_per_s": len(rows) / timings.median("tree"),
    }


def has_room_for_rows(sized: Sizes, subject: Subject, axis: int) -> bool:
    """Whether a packed pass of a row, `axis` positions, fits in memory."""
    return pass_bytes(subject, axis) <= MARGIN * sized.limit_bytes


def pass_bytes(subject: Subject, axis: int) -> int:
    """What a packed pass of `axis` positions has alive, by the learner's estimate, and the moments, which no pass reads."""
    slots = tree_bytes(subject.state.params)
    return packed_bytes(subject.config, microbatch_shape(axis), base=tree_bytes(subject.params), slots=slots) + 2 * slots


def largest(sized: Sizes, mode: PrefixGradient) -> Result:
    """The longest path that fits: bytes are affine in its blocks, so the compiler is asked at two lengths; then a visit at that path's end is run.

    mode: a constant prefix has no gradient, so its path takes half the memory.
    """
    subject = make_subject(sized.largest_base, dtype=dtype_here())
    short, long = 64 * SPAN, 128 * SPAN
    low, high = (visit_peak(subject, blocks, sized.chunk, mode) for blocks in (short, long))
    per_block = (high - low) / (long - short)
    resident = tree_bytes(subject.state) - tree_bytes(subject.state.params)  # moments and gradient, which no program of a visit reads
    blocks = short + math.floor((MARGIN * sized.limit_bytes - resident - low) / per_block)
    blocks = max(2 * sized.chunk // TILE, blocks // SPAN * SPAN)
    visit_at_the_end(subject, blocks, sized.chunk, mode)
    return {"mode": mode, "positions": blocks * TILE, "bytes": visit_peak(subject, blocks, sized.chunk, mode), "limit_bytes": sized.limit_bytes}


def dtype_here() -> npt.DTypeLike:
    """Of the base: as a server would choose it."""
    return jnp.dtype(base_dtype())


def table(result: Result) -> Table:
    """The parts for people."""
    shown = Table("part", "measured", "seconds", title=f"{result['device']}, JAX {result['jax']}, {result['date']}")
    for name, part in result["parts"].items():
        values = ", ".join(f"{key} {_shown(value)}" for key, value in part.items() if key != "seconds")
        shown.add_row(name, values, f"{part['seconds']:.0f}")
    for name in result["skipped"]:
        shown.add_row(name, "skipped: the time was up", "")
    return shown


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """The command of scripts/gpu_check.sh."""
    parser = argparse.ArgumentParser(description="GPU check: parity, replay, largest prefix, adapters, in at most four minutes")
    parser.add_argument("out", type=Path, help="the JSON file to write; the table goes beside it, as .md")
    path = parser.parse_args().out
    path.parent.mkdir(parents=True, exist_ok=True)
    result = measure(path)
    console = Console(width=140, record=True)
    console.print(table(result))
    path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")


def markdown(result: Result) -> str:
    """The table as a page of docs/results."""
    shown = table(result)
    cells = [list(column.cells) for column in shown.columns]
    rows = "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in zip(*cells, strict=True))
    head = f"# GPU check\n\n{shown.title}, Python {result['python']}, sizes: {result['sizes']}.\n\n"
    return head + f"| part | measured | seconds |\n|---|---|---|\n{rows}\n"


if __name__ == "__main__":
    main()
