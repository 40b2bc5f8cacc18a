"""`noria bench packing`: what the closed set of shapes costs in padding, and that it is closed, under a stream of random batches.

Eight runs, each of a kind of its own, bring one batch after another, 1,000 in all, the same ones in whatever order they are served: whoever's batch
is done brings its next, so that the axis is filled from whoever is ready, as in a server. Passes are those of the learner's own queues, order and
planner (`learners.passes`). Then a learner of two rank classes, with room for a path, is warmed up and trains: what XLA compiles is counted.
`num_programs` are the learner's jitted functions, `compilations_after_warmup` is anything.

    waste   1 - useful / dispatched, the larger of positions (whole tiles of 64) and entries (chunks of the head that run)

Positions that a cut repeats, the shared head of a tree that does not fit in one pass, count as useful: `repeated` says how large a part of the
dispatched ones they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import jax
import numpy as np
from jax import monitoring
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.executors import program_names
from noria.bench.harness import Bar, Report, Result
from noria.bench.learners import add_runs, make_learner, passes, train_in_turn
from noria.bench.trees import group, tree_of
from noria.config import LearnerConfig
from noria.learner.batches import BatchPlanner, Costs, PlannedBatch
from noria.learner.learner import Learner
from noria.learner.step import counts_tiles
from noria.model.config import ModelConfig
from noria.rl.packing import MicrobatchPlan, shapes_up_to
from noria.types import Completion, Episode, EpisodeGroup, LossSpec, Task, TokenTree, Turn

NUM_RUNS: Final = 8
MAX_POSITIONS: Final = 1024
WASTE: Final = 0.05
PROGRAMS: Final = 16
RANKS: Final = (8, 32)

COMPILED: Final = "/jax/core/compile/backend_compile_duration"

LOSSES: Final = (
    LossSpec(sequence_mask_c=2.0, kl_coeff=0.1, entropy_coeff=0.01),
    LossSpec(kind="ppo"),
    LossSpec(kind="cispo", m2_cap=0.1),
    LossSpec(kind="dro"),
    LossSpec(kind="gspo"),
    LossSpec(kind="importance_sampling", icepop_low=0.5, icepop_high=5.0),
    LossSpec(kind="cross_entropy"),
    LossSpec(kind="dpo"),
)
"""Of the runs: of every scope, with the adapter off first, and over the whole batch."""


@dataclass(slots=True)
class Waste:
    """Sums over passes: what was useful, and what was dispatched for it."""

    positions: int = 0
    entries: int = 0
    dispatched_positions: int = 0
    dispatched_entries: int = 0

    def add(self, plan: MicrobatchPlan) -> None:
        """Count one pass."""
        self.positions += plan.num_positions
        self.entries += plan.num_entries
        self.dispatched_positions += plan.dispatched_positions
        self.dispatched_entries += plan.dispatched_entries

    @property
    def fraction(self) -> float:
        """The larger waste of the two axes."""
        return max(1 - self.positions / self.dispatched_positions, 1 - self.entries / self.dispatched_entries)


def random_batch(seed: int, slot: int, vocab_size: int) -> TokenTree:
    """A batch of run `slot`, whose lengths are of its own kind: groups of 4 to 8, prompts of 20 to 400 ids, answers of 4 to 200 tokens."""
    kind, rng = np.random.default_rng(slot), np.random.default_rng([seed, slot])
    members, prompt, answer = int(kind.integers(4, 9)), int(kind.integers(20, 401)), int(kind.integers(4, 201))
    header = _ids(rng, vocab_size, int(kind.integers(0, prompt // 2 + 1)))
    groups = []
    for index in range(int(kind.integers(1, 5))):
        observation = header + _ids(rng, vocab_size, max(1, int(rng.integers(prompt // 2, prompt + 1)) - len(header)))
        episodes = []
        for member in range(members):
            sampled = _ids(rng, vocab_size, int(rng.integers(max(1, answer // 4), answer + 1)))
            completion = Completion(sampled, (-5.0,) * len(sampled), (0,) * len(sampled), "stop")
            episodes.append(Episode(f"{index}.{member}", member, (Turn(observation, completion, 1.0),), float(member % 2)))
        groups.append(EpisodeGroup(str(index), str(slot), Task(index, 0), tuple(episodes)))
    return tree_of(groups)


def measure(*, quick: bool = False) -> Report:
    """Everything. quick: 40 batches on a short axis, said in the result."""
    num_batches, max_positions = (40, 768) if quick else (1000, MAX_POSITIONS)
    loaded = base_of("tiny")
    values = measure_waste(loaded.config, num_batches, max_positions)
    settings = LearnerConfig(max_positions=max_positions, path_positions=4 * max_positions, num_slots=NUM_RUNS // 2 - 1, rank_classes=RANKS)
    learner = make_learner(loaded, settings)
    jax.clear_caches()  # what this process has compiled before would not be counted
    with compilations() as names:
        learner.warm_up()
        num_warm = len(names)
        ranks = dict(zip(map(str, range(NUM_RUNS)), cycle(RANKS), strict=False))
        add_runs(learner, loaded, ranks)
        train(learner, loaded.config.vocab_size, num_each=1 if quick else 4)
        num_later = len(names) - num_warm
    jitted = program_names()
    values |= {"num_programs": sum(name in jitted for name in names[:num_warm]), "compilations_after_warmup": num_later}
    return Report("packing", "tiny", values, bars_of(values), quick)


def measure_waste(config: ModelConfig, num_batches: int, max_positions: int) -> Result:
    """Padding of the passes of so many batches."""
    shapes = shapes_up_to(max_positions, is_counted=counts_tiles())
    planner, waste, num_passes, num_tree = BatchPlanner(shapes[-1]), Waste(), 0, 0

    def of_run(slot: int) -> Iterator[PlannedBatch]:
        nonlocal num_tree
        for seed in range(slot, num_batches, NUM_RUNS):
            tree = random_batch(seed, slot, config.vocab_size)
            num_tree += len(tree)
            yield planner.plan(tree)

    for plan in passes({str(slot): of_run(slot) for slot in range(NUM_RUNS)}, shapes, Costs(config)):
        waste.add(plan)
        num_passes += 1
    return {
        "padding_waste": waste.fraction,
        "positions_waste": 1 - waste.positions / waste.dispatched_positions,
        "entries_waste": 1 - waste.entries / waste.dispatched_entries,
        "repeated": (waste.positions - num_tree) / waste.dispatched_positions,
        "num_passes": num_passes,
        "dispatched_positions": waste.dispatched_positions,
    }


def train(learner: Learner, vocab_size: int, num_each: int) -> None:
    """So many random batches of every run, runs of both classes with losses of all kinds side by side, more of them than slots; and a walk."""
    planner = learner.planner

    def of_run(slot: int) -> Iterator[PlannedBatch]:
        for number in range(num_each):
            tree = random_batch(number, slot, vocab_size)
            pair_M = np.unique(tree.entries.sequence_M, return_inverse=True)[1].astype(np.int32) // 2
            yield planner.plan(tree, columns={"pair_M": pair_M} if LOSSES[slot].kind == "dpo" else {})

    train_in_turn(learner, {str(slot): of_run(slot) for slot in range(NUM_RUNS)}, lambda run_id: LOSSES[int(run_id)])
    walked = planner.plan(group(vocab_size, prompt=2 * planner.shape.num_positions, answer=8, members=4))
    assert walked.walk is not None, "it fits in no pass"
    train_in_turn(learner, {run_id: iter([walked]) for run_id in ("0", "1")}, lambda run_id: LOSSES[int(run_id)])


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that XLA compiles meanwhile, as they come."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == COMPILED:
            names.append(str(about.get("fun_name")).removeprefix("jit(").removesuffix(")"))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        monitoring.unregister_event_duration_listener(listen)


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks of these numbers."""
    return (
        Bar("padding_waste", values["padding_waste"], at_most=WASTE),
        Bar("num_programs", values["num_programs"], at_most=PROGRAMS),
        Bar("compilations_after_warmup", values["compilations_after_warmup"], at_most=0),
    )


def table(report: Report) -> Table:
    """The measurement for people."""
    shown = Table("measured", "value", title=f"packing, {report.base}")
    for key, value in report.values.items():
        shown.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
    return shown


def _ids(rng: np.random.Generator, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.integers(0, vocab_size, count))
