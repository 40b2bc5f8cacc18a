"""`noria bench replay`: one gradient with the prefixes shared, against our own efficient path without sharing, on the same rows.

Per case the executors take turns: `baseline` packs every row alone (trees.unshared) on the axis that wastes least, `packed` and `replay` train the
tree. What sharing may at most give is the ratio of FLOPs (bench/flops.py); a walk runs long prefixes forward more than once, and is compared with
rho, the ratio of positions. What the baseline is worth is measured too: against packed training of unrelated sequences on a full axis.

Repeats of the whole SmolLM2 at P = 4096 would take minutes, so the long cases run on its first layers, and their names say so. Where much of a tree
is trained, 4 layers are too few: the head, which no sharing spares, is then most of the work, and the ratio of FLOPs itself is below 0.6 rho.

How far gradients differ is a matter of float32 where the base is deep: those of 16 layers move by 2e-5 to 6e-5 when every weight does by a unit in
its last place, measured too (`grad_noise`). In float64 both executors agree with the baseline to 1e-13 (docs/decisions.md, 2026-11-30).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.executors import (
    LORA,
    Subject,
    best_axis,
    make_subject,
    packed_axis,
    packed_gradient,
    packed_peak,
    relative_l2,
    replay_gradient,
    replay_peak,
    rounding_noise,
)
from noria.bench.flops import training_flops
from noria.bench.harness import REPEATS, Bar, Report, Result, alternate
from noria.bench.memory import tree_bytes
from noria.bench.trees import agent, group, sequences, tool_prompt, unshared
from noria.learner.memory import chunk_bytes, path_bytes
from noria.model.lora import AdapterTree
from noria.rl.chunks import PrefixGradient, plan_replay
from noria.rl.packing import microbatch_shape
from noria.types import TokenTree

PACKED_FRACTION: Final = 0.9
REPLAY_FRACTION: Final = 0.65
LARGE_RATIO: Final = 8.0
LARGE_SPEEDUP: Final = 7.5
PEAK: Final = 1.15
GROWTH: Final = 0.01
BASELINE: Final = 0.85
GRADIENT: Final = 1e-5

BASELINE_WORK: Final = "baseline"


@dataclass(frozen=True, slots=True)
class Case:
    """A batch and how it is trained. num_layers: of the base, None for all. executors: (executor, mode) pairs beside the baseline. chunk: positions
    of a walk's chunk. prompt, answer, members: P, R, G of a group."""

    name: str
    num_layers: int | None
    make: Callable[[int], TokenTree]
    executors: tuple[tuple[str, PrefixGradient], ...]
    chunk: int
    prompt: int | None = None
    answer: int | None = None
    members: int | None = None


BOTH: Final[tuple[tuple[str, PrefixGradient], ...]] = (("packed", "exact"), ("replay", "exact"))


def group_case(name: str, num_layers: int | None, sizes: tuple[int, int, int], executors: tuple[tuple[str, PrefixGradient], ...], chunk: int) -> Case:
    """One group; sizes: (P, R, G)."""
    prompt, answer, members = sizes
    return Case(name, num_layers, lambda v: group(v, prompt=prompt, answer=answer, members=members), executors, chunk, prompt, answer, members)


def full_cases() -> tuple[Case, ...]:
    """The sizes that are compared."""
    return (
        group_case("smollm2 group", None, (512, 32, 8), (*BOTH, ("replay", "stop")), 256),
        group_case("smollm2-4-layers group", 4, (1024, 16, 16), BOTH, 512),
        group_case("smollm2-4-layers group", 4, (4096, 64, 8), (*BOTH, ("replay", "stop")), 512),
        Case(
            "smollm2-16-layers tool prompt of 512, 8 groups of 4",
            16,
            lambda v: tool_prompt(v, prompt=512, task=64, answer=32, groups=8, members=4),
            BOTH,
            512,
        ),
        Case(
            "smollm2-16-layers agent, 4 turns x 8 branches",
            16,
            lambda v: agent(v, prompt=512, observation=64, answer=64, turns=4, branches=8),
            BOTH,
            1024,
        ),
    )


def quick_cases() -> tuple[Case, ...]:
    """A size that only shows that every executor runs."""
    return (group_case("tiny group", None, (192, 8, 4), (*BOTH, ("replay", "stop")), 128),)


def measure(*, quick: bool = False, repeats: int = REPEATS) -> Report:
    """Everything. quick: tiny sizes on the tiny base, said in the result. Raises what loading the base raises."""
    base, cases = ("tiny", quick_cases()) if quick else ("smollm2-135m", full_cases())
    rows: list[Result] = []
    for case in cases:
        rows += measure_case(base, case, repeats)
    values: Result = {
        "cases": rows,
        "peak_growth_g2_g16": peak_growth(base, cases[0]),
        "baseline_over_packed_training": baseline_over_packed_training(base, cases[0], repeats),
    }
    return Report("replay", base, values, bars_of(values), quick)


def measure_case(base: str, case: Case, repeats: int) -> list[Result]:
    """A row for each executor of the case, all timed by turns with one baseline."""
    loaded = base_of(base, case.num_layers)
    subject = make_subject(loaded)
    tree = case.make(loaded.config.vocab_size)
    rows = unshared(tree)
    works = {BASELINE_WORK: baseline(subject, rows)}
    works |= {f"{executor} {mode}": work_of(subject, tree, executor, mode, case.chunk) for executor, mode in case.executors}
    gradients = {name: work() for name, work in works.items()}  # and everything is compiled
    timings = alternate(works, repeats=repeats)
    noise = rounding_noise(subject, works[BASELINE_WORK], gradients[BASELINE_WORK])
    rho = len(rows) / len(tree)
    flop_ratio = training_flops(rows, subject.config, LORA.rank) / training_flops(tree, subject.config, LORA.rank)
    made: list[Result] = []
    for executor, mode in case.executors:
        name = f"{executor} {mode}"
        speedup = timings.ratio(BASELINE_WORK, name)
        peak, formula = peaks(subject, tree, executor, mode, case.chunk)
        made.append(
            {
                "name": case.name,
                "P": case.prompt,
                "R": case.answer,
                "G": case.members,
                "executor": executor,
                "mode": mode,
                "rho": rho,
                "flop_ratio": flop_ratio,
                "speedup": speedup,
                "fraction_of_flop_ratio": speedup / flop_ratio,
                "grad_rel_l2": relative_l2(gradients[name], gradients[BASELINE_WORK]),
                "grad_noise": noise,
                "peak_bytes": peak,
                "peak_over_formula": peak / formula,
            }
        )
    return made


def baseline(subject: Subject, rows: TokenTree) -> Callable[[], AdapterTree]:
    """Our own efficient path without sharing, ready to call."""
    axis = best_axis(rows)
    return lambda: packed_gradient(subject, rows, axis)


def work_of(subject: Subject, tree: TokenTree, executor: str, mode: PrefixGradient, chunk: int) -> Callable[[], AdapterTree]:
    """The tree's gradient by one executor, ready to call."""
    if executor == "replay":
        return lambda: replay_gradient(subject, tree, chunk, mode)
    axis = packed_axis(tree)
    return lambda: packed_gradient(subject, tree, axis)


def peaks(subject: Subject, tree: TokenTree, executor: str, mode: PrefixGradient, chunk: int) -> tuple[int, int]:
    """(most bytes alive, what they ought to be): base + path's keys, values and their gradient + one chunk's own + adapters' gradients. A packed pass
    is a chunk without a path. The adapters themselves are alive too; no part of the formula is theirs."""
    config, base, slots = subject.config, tree_bytes(subject.params), tree_bytes(subject.state.params)
    axis = chunk if executor == "replay" else packed_axis(tree)
    formula = base + slots + chunk_bytes(config, microbatch_shape(axis), base=base, slots=slots, has_path=executor == "replay")
    if executor == "packed":
        return packed_peak(subject, tree, axis), formula
    chunks = plan_replay(tree, chunk, mode).chunks
    path, owed = max(c.first_block for c in chunks), max(c.first_block - c.num_constant for c in chunks)
    return replay_peak(subject, tree, chunk, mode), formula + path_bytes(config, path) + path_bytes(config, owed)


def peak_growth(base: str, case: Case) -> float:
    """How much more the walk of a group needs at 16 members than at 2: relative, of the most bytes alive."""
    loaded = base_of(base, case.num_layers)
    subject = make_subject(loaded)
    assert case.prompt is not None
    assert case.answer is not None
    few, many = (group(loaded.config.vocab_size, prompt=case.prompt, answer=case.answer, members=members) for members in (2, 16))
    small, large = (peaks(subject, tree, "replay", "exact", case.chunk)[0] for tree in (few, many))
    return large / small - 1


def baseline_over_packed_training(base: str, case: Case, repeats: int) -> float:
    """Positions per second of the baseline over those of plain packed training: unrelated rows on an axis that they fill to the last position."""
    loaded = base_of(base, case.num_layers)
    subject = make_subject(loaded)
    rows = unshared(case.make(loaded.config.vocab_size))
    axis = best_axis(rows)
    length, answer = int(np.max(rows.depth_T)) + 1, case.answer or 1
    lengths = [length] * (axis // length) + [axis % length] * (axis % length > 0)
    plain = sequences(loaded.config.vocab_size, lengths=lengths, entries_each=answer)
    works: dict[str, Callable[[], AdapterTree]] = {
        "baseline": lambda: packed_gradient(subject, rows, axis),
        "plain": lambda: packed_gradient(subject, plain, axis),
    }
    for work in works.values():
        work()
    timings = alternate(works, repeats=repeats)
    return timings.ratio("plain", "baseline") * len(rows) / len(plain)


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks of these numbers; of several cases the worst counts."""
    exact = [row for row in values["cases"] if row["mode"] == "exact"]
    packed = [row for row in exact if row["executor"] == "packed"]
    walked = [row for row in exact if row["executor"] == "replay"]
    large = [row["speedup"] for row in packed if row["flop_ratio"] >= LARGE_RATIO]
    return (
        Bar("packed_speedup_over_flop_ratio", min(row["fraction_of_flop_ratio"] for row in packed), at_least=PACKED_FRACTION),
        Bar("replay_speedup_over_rho", min(row["speedup"] / row["rho"] for row in walked), at_least=REPLAY_FRACTION),
        Bar("speedup_at_flop_ratio_8", max(large, default=None), at_least=LARGE_SPEEDUP),
        Bar("replay_peak_over_formula", max(row["peak_over_formula"] for row in walked), at_most=PEAK),
        Bar("peak_growth_g2_g16", values["peak_growth_g2_g16"], at_most=GROWTH),
        Bar("baseline_over_packed_training", values["baseline_over_packed_training"], at_least=BASELINE),
        Bar("grad_rel_l2", max(row["grad_rel_l2"] for row in exact), at_most=GRADIENT),
    )


def table(report: Report) -> Table:
    """The measurement for people."""
    shown = Table(
        "case", "P, R, G", "executor", "rho", "flops", "speedup", "of flops", "grad", "noise", "MiB", "of formula", title=f"replay, {report.base}"
    )
    for row in report.values["cases"]:
        sizes = ", ".join(str(row[key]) for key in "PRG") if row["P"] else ""
        shown.add_row(
            row["name"],
            sizes,
            f"{row['executor']} {row['mode']}",
            f"{row['rho']:.2f}",
            f"{row['flop_ratio']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['fraction_of_flop_ratio']:.2f}",
            f"{row['grad_rel_l2']:.1e}",
            f"{row['grad_noise']:.0e}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['peak_over_formula']:.2f}",
        )
    return shown
