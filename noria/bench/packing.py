"""`noria bench packing`: what the closed set of shapes costs in padding, and that it is closed, under a stream of random batches.

Eight runs of mixed shapes stand in the learner's line. Whenever a run's batch is done it brings the next one, so that the axis is filled from
whoever is ready, as in a server: 1,000 batches in all. Planning sees every batch; every shape of pass also runs on the device, with real batches,
and what XLA compiles is counted: `num_programs` are the learner's jitted functions, a walk's among them, `compilations_after_warmup` anything.

    waste   1 - useful / dispatched, the larger of positions (the axis) and entries (chunks of the head that run)
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jax import monitoring
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.executors import Subject, make_subject, optimizer_step, pass_gradient, program_names, replay_gradient, upload
from noria.bench.harness import Bar, Report, Result
from noria.bench.trees import group, sequences, tree_of
from noria.rl.packing import MicrobatchPlan, MicrobatchShape, ReadyRun, cut, pack, plan_microbatch, shapes_up_to
from noria.types import TILE, Completion, Episode, EpisodeGroup, Piece, Task, Turn

NUM_RUNS: Final = 8
MAX_POSITIONS: Final = 1024
WASTE: Final = 0.05
PROGRAMS: Final = 16
CHUNK: Final = 256
"""Of the walk that is part of the warm-up, as in a server with room for a path."""

COMPILED: Final = "/jax/core/compile/backend_compile_duration"


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


@dataclass(slots=True)
class Line:
    """The runs with a batch under way, in the order in which they are served: who was just served goes to the end."""

    seed: int
    shapes: tuple[MicrobatchShape, ...]
    num_batches: int
    vocab_size: int
    runs: deque[ReadyRun] = field(default_factory=deque)
    num_started: int = 0

    def plans(self) -> Iterator[MicrobatchPlan]:
        """The passes of all batches, until the last is done."""
        for slot in range(NUM_RUNS):
            self._start(slot)
        while self.runs:
            plan = plan_microbatch(list(self.runs), self.shapes, self.shapes[-1].num_positions)
            yield plan
            taken = {p.slot: p.piece_index + 1 for p in plan.pieces}
            waiting = [run for run in self.runs if run.slot not in taken]
            served = [ReadyRun(r.run_id, r.slot, r.pieces, taken[r.slot]) for r in self.runs if r.slot in taken]
            self.runs = deque(waiting + [run for run in served if run.next_piece < len(run.pieces)])
            for run in served:
                if run.next_piece == len(run.pieces):
                    self._start(run.slot)

    def _start(self, slot: int) -> None:
        if self.num_started < self.num_batches:
            pieces = random_batch(self.seed + self.num_started, slot, self.vocab_size, self.shapes[-1])
            self.num_started += 1
            self.runs.append(ReadyRun(str(slot), slot, pieces))


def random_batch(seed: int, slot: int, vocab_size: int, shape: MicrobatchShape) -> tuple[Piece, ...]:
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
    return cut(tree_of(groups), shape)


def measure(*, quick: bool = False) -> Report:
    """Everything. quick: 40 batches on a short axis, said in the result."""
    num_batches, max_positions = (40, 768) if quick else (1000, MAX_POSITIONS)
    loaded, shapes = base_of("tiny"), shapes_up_to(max_positions)
    waste, planned = Waste(), dict[int, list[MicrobatchPlan]]()
    for plan in Line(0, shapes, num_batches, loaded.config.vocab_size).plans():
        waste.add(plan)
        planned.setdefault(plan.shape.num_positions, []).append(plan)
    with compilations() as names:
        subject = make_subject(loaded, num_slots=NUM_RUNS)
        warm_up(subject, shapes)
        num_warm = len(names)
        run_passes(subject, [plan for plans in planned.values() for plan in plans[:: max(1, len(plans) // 4)]])
        num_later = len(names) - num_warm
    jitted = program_names()
    values: Result = {
        "padding_waste": waste.fraction,
        "num_programs": sum(name in jitted for name in names[:num_warm]),
        "compilations_after_warmup": num_later,
        "num_passes": sum(len(plans) for plans in planned.values()),
        "dispatched_positions": waste.dispatched_positions,
    }
    return Report("packing", "tiny", values, bars_of(values), quick)


def warm_up(subject: Subject, shapes: tuple[MicrobatchShape, ...]) -> None:
    """One pass of every shape, a walk over chunks, an optimizer step: what a server compiles before its first run."""
    piece = cut(sequences(subject.config.vocab_size, lengths=[TILE], entries_each=1), shapes[0])
    gradient = subject.state.gradient
    for shape in shapes:
        plan = plan_microbatch([ReadyRun("0", 0, piece)], [shape], shape.num_positions)
        gradient = pass_gradient(subject, upload(pack(plan)), gradient)
    optimizer_step(subject, 0, gradient)
    replay_gradient(subject, group(subject.config.vocab_size, prompt=2 * CHUNK, answer=8, members=4), CHUNK)


def run_passes(subject: Subject, plans: list[MicrobatchPlan]) -> None:
    """These passes, and an optimizer step of every run."""
    gradient = subject.state.gradient
    for plan in plans:
        gradient = pass_gradient(subject, upload(pack(plan)), gradient)
    for slot in range(NUM_RUNS):
        optimizer_step(subject, slot, gradient)
        gradient = subject.state.gradient


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
