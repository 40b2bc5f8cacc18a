"""The fair order on a virtual clock: the learner's own order and planner, with a cost model in place of the device.

Against one run at a time (first come, first served) and lockstep (whoever waits shares a round, and hears of it at its end).
"""

import functools
import heapq
import itertools
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.learner.queue import FairOrder, Offer, plan_pass
from noria.rl.packing import shapes_up_to
from noria.types import Entries, Piece

SHAPES = shapes_up_to(1024)
SECONDS_PER_POSITION = 1e-3
"""A full microbatch takes 1.02 s, about what it does on two cores."""
PASS_S = 0.05
QUANTUM_S = 10.0


@functools.cache
def piece(num_positions):
    count = num_positions // 4
    zeros, floats = np.zeros(count, np.int32), np.zeros(count, np.float32)
    entries = Entries(zeros, zeros, floats + 1, floats, floats, floats, zeros, zeros)
    ids = np.zeros(num_positions, np.int32)
    return Piece(ids, ids, ids + 1, entries)


def cost(piece):
    """A position is a FLOP."""
    return float(piece.num_tiles * 64)


@dataclass(eq=False)
class Step:
    run: str
    pieces: list
    arrived: float
    left: int = 0
    done: float = 0.0

    @property
    def solo_s(self):
        return alone_s(tuple(p.num_tiles for p in self.pieces))


@functools.cache
def alone_s(tiles):
    """Seconds of these pieces with nobody else."""
    seconds, at = 0.0, 0
    while at < len(tiles):
        plan = plan_pass([Offer("", 8, "train", [piece(64 * t) for t in tiles[at:]])], SHAPES, 1024, num_slots=8)
        seconds, at = seconds + pass_s(plan), at + len(plan.pieces)
    return seconds


def pass_s(plan):
    """A pass is dispatched, and reads the base, however short it is."""
    return PASS_S + plan.dispatched_positions * SECONDS_PER_POSITION


@dataclass
class World:
    """Arrivals: (time, run, sizes of pieces). think_s: of a closed loop: the run's next step arrives so long after its last."""

    arrivals: list
    think_s: dict = field(default_factory=dict)
    repeats: int = 1
    weights: dict = field(default_factory=dict)


class Simulation:
    """A world under a policy: "fair", "first" or "lockstep". run(): all steps, with their times."""

    def __init__(self, world, policy, watch=lambda _fair, _ready, _plan: None):
        self.world, self.policy, self.watch = world, policy, watch
        self.events = [(time, number, run, sizes, world.repeats) for number, (time, run, sizes) in enumerate(world.arrivals)]
        heapq.heapify(self.events)
        self.clock, self.waiting, self.finished, self.repeats_left, self.numbers = 0.0, [], [], {}, itertools.count(len(self.events))
        self.fair = FairOrder(QUANTUM_S / SECONDS_PER_POSITION)
        self.round, self.turn = [], None

    def run(self):
        while self.events or self.waiting:
            self.arrive()
            first_of = {}
            for step in self.waiting:
                first_of.setdefault(step.run, step)
            order = self.order(first_of)
            offers = [Offer(step.run, 8, "train", step.pieces[step.left :]) for step in order]
            plan = plan_pass(offers, SHAPES, 1024, num_slots=64)
            self.clock += pass_s(plan)
            of_run = {step.run: step for step in order}
            for planned in plan.pieces:
                of_run[planned.run_id].left += 1
                self.fair.charge(planned.run_id, cost(planned.piece))
            self.watch(self.fair, list(first_of), plan)
            for step in self.done():
                self.finish(step)
        return self.finished

    def arrive(self):
        if not self.waiting:
            self.clock = max(self.clock, self.events[0][0])
        while self.events and self.events[0][0] <= self.clock:
            time, _, run, sizes, repeats = heapq.heappop(self.events)
            self.waiting.append(Step(run, [piece(size) for size in sizes], time))
            self.repeats_left[run] = repeats - 1
            self.fair.activate(run, self.world.weights.get(run, 1.0))

    def order(self, first_of):
        """The steps that may go next, the first one first."""
        if self.policy == "fair":
            return [first_of[run] for run in self.fair.order(first_of)]
        if self.policy == "first":
            self.turn = self.turn if self.turn in self.waiting else self.waiting[0]
            return [self.turn]
        self.round = self.round or list(self.waiting)
        return [step for step in self.round if step.left < len(step.pieces)]

    def done(self):
        """The steps whose futures complete now."""
        if self.policy != "lockstep":
            return [step for step in self.waiting if step.left == len(step.pieces)]
        done, self.round = (self.round, []) if all(step.left == len(step.pieces) for step in self.round) else ([], self.round)
        return done

    def finish(self, step):
        step.done = self.clock
        self.waiting.remove(step)
        self.finished.append(step)
        self.fair.end_turn(step.run)
        if not any(other.run == step.run for other in self.waiting):
            self.fair.deactivate(step.run)
        if self.repeats_left[step.run]:
            sizes, again_s = [64 * p.num_tiles for p in step.pieces], self.clock + self.world.think_s[step.run]
            heapq.heappush(self.events, (again_s, next(self.numbers), step.run, sizes, self.repeats_left[step.run]))


def simulate(world, policy, **more):
    return Simulation(world, policy, **more).run()


def latency(steps):
    return float(np.mean([step.done - step.arrived for step in steps]))


def jain(steps):
    """Jain's index of the runs' mean slowdowns: 1 = all alike."""
    by_run = {}
    for step in steps:
        by_run.setdefault(step.run, []).append((step.done - step.arrived) / step.solo_s)
    x = np.array([np.mean(values) for values in by_run.values()])
    return float(x.sum() ** 2 / (len(x) * (x**2).sum()))


def equal_runs(seed):
    """Eight runs with steps of about 4 s, each back 8 s after its last, when its actors have played again."""
    rng = np.random.default_rng(seed)
    sizes = {f"run{n}": [int(s) for s in rng.choice([512, 640, 1024], 5)] for n in range(8)}
    return World([(float(rng.random()), run, s) for run, s in sizes.items()], dict.fromkeys(sizes, 8.0), repeats=12)


def one_long_many_short(seed):
    """One run with steps of 40 s and eight with steps of half a second to two."""
    rng = np.random.default_rng(seed)
    sizes = {f"short{n}": [int(rng.choice([256, 512, 768]))] * int(rng.integers(1, 4)) for n in range(8)} | {"long": [1024] * 40}
    return World([(float(rng.random()), run, s) for run, s in sizes.items()], {**dict.fromkeys(sizes, 6.0), "long": 1.0}, repeats=6)


def bursts(seed):
    """Now and then many runs at once, with steps of all sizes."""
    rng = np.random.default_rng(seed)
    arrivals = []
    for burst in range(6):
        start = 60.0 * burst + float(rng.random())
        for run in rng.permutation(12)[: rng.integers(4, 12)]:
            arrivals.append((start + float(rng.random()), f"run{run}", [int(s) for s in rng.choice([128, 256, 512, 896], rng.integers(1, 12))]))
    return World(arrivals)


WORLDS = {"equal runs": equal_runs, "one long, many short": one_long_many_short, "bursts": bursts}


@pytest.mark.parametrize("name", WORLDS)
def test_steps_are_no_later_than_one_run_at_a_time_or_in_lockstep(name):
    """On average over eight draws of the world: whose turn is first among equals is chance."""
    policies = ("fair", "first", "lockstep")
    steps = {policy: [simulate(WORLDS[name](seed), policy) for seed in range(8)] for policy in policies}
    mean = {policy: float(np.mean([latency(found) for found in steps[policy]])) for policy in policies}
    index = {policy: float(np.mean([jain(found) for found in steps[policy]])) for policy in policies}
    assert [len(found) for found in steps["fair"]] == [len(found) for found in steps["first"]], "all finish"
    sys.stdout.write(f"\n{name}: " + "; ".join(f"{p} {mean[p]:.2f} s to a step, Jain {index[p]:.3f}" for p in policies) + "\n")
    assert mean["fair"] <= 1.05 * mean["first"]
    assert mean["fair"] <= mean["lockstep"]


def test_one_long_job_does_not_starve_short_ones_nor_they_it():
    world = one_long_many_short(0)
    slowdown = {}
    for policy in ("fair", "first"):
        for step in simulate(world, policy):
            slowdown.setdefault((policy, step.run.rstrip("0123456789")), []).append((step.done - step.arrived) / step.solo_s)
    mean = {key: float(np.mean(values)) for key, values in slowdown.items()}
    assert mean["fair", "short"] < 0.5 * mean["first", "short"]
    assert mean["fair", "long"] < 9, "it has its ninth of the learner at worst"


def test_equal_runs_do_not_march_in_lockstep():
    """Of eight equal steps that arrive together the first is done after an eighth of the time, not all at its end."""
    world = World([(0.0, f"run{n}", [1024] * 4) for n in range(8)])
    done = sorted(step.done for step in simulate(world, "fair"))
    assert np.diff(done) == pytest.approx([4 * (1.024 + PASS_S)] * 7)
    assert [step.done for step in simulate(world, "lockstep")] == pytest.approx([done[-1]] * 8)


def test_a_newcomer_earns_no_credit_by_idling():
    fair = FairOrder(100.0)
    fair.activate("old", 1.0)
    for _ in range(50):
        fair.order(["old"])
        fair.charge("old", 100.0)
    fair.activate("new", 1.0)
    assert fair.service("new") == fair.service("old")
    had = {"old": 0.0, "new": 0.0}
    for _ in range(40):
        run = fair.order(["old", "new"])[0]
        fair.charge(run, 50.0)
        had[run] += 50.0
    assert had["old"] == pytest.approx(had["new"], abs=100.0)


def test_a_turn_goes_on_until_its_batch_is_done_or_a_quantum_is_used_up_while_others_wait():
    fair = FairOrder(100.0)
    for run in ("a", "b"):
        fair.activate(run, 1.0)
    turns = []
    for _ in range(6):
        turns.append(fair.order(["a", "b"])[0])
        fair.charge(turns[-1], 40.0)
    assert turns == ["a", "a", "a", "b", "b", "b"]
    assert fair.order(["a"]) == ["a"]
    fair.charge("a", 400.0)
    assert fair.order(["a", "b"]) == ["b"], "a is a quantum ahead: it fills no room"
    fair.end_turn("b")
    fair.charge("b", 1000.0)
    assert fair.order(["a", "b"])[0] == "a"


def test_a_microbatch_holds_one_rank_class_and_only_trains_what_wants_to():
    small = [piece(128)]
    first = Offer("a", 8, "train", small)
    others = [
        Offer("wide", 16, "train", small),
        Offer("scored", 8, "score", small),
        Offer("base", 8, "reference", small),
        Offer("b", 8, "train", small),
    ]
    assert [p.run_id for p in plan_pass([first, *others], SHAPES, 1024, num_slots=8).pieces] == ["a", "scored", "b"]
    assert [p.run_id for p in plan_pass([others[1], first, *others], SHAPES, 1024, num_slots=8).pieces] == ["scored", "scored"]
    assert [p.run_id for p in plan_pass([first, *others], SHAPES, 1024, num_slots=2).pieces] == ["a", "scored"]


RUNS = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.lists(st.sampled_from([64, 128, 320, 640, 1024]), min_size=1, max_size=30),
        st.sampled_from([0.5, 1.0, 4.0]),
        st.floats(0, 5),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(RUNS)
def test_no_run_is_ahead_of_another_by_more_than_a_quantum_and_a_microbatch(made):
    """For all mixtures, of service over weight among ready runs; and nobody's clock goes back."""
    names = [f"run{n}" for n in range(len(made))]
    world = World(
        [(time, run, sizes) for run, (time, sizes, _, _) in zip(names, made, strict=True)],
        {run: think for run, (*_, think) in zip(names, made, strict=True)},
        repeats=3,
        weights={run: weight for run, (_, _, weight, _) in zip(names, made, strict=True)},
    )
    quantum, last = QUANTUM_S / SECONDS_PER_POSITION, {}

    def watch(fair, ready, plan):
        services = {run: fair.service(run) for run in ready}
        least = min(services.values())
        for run, service in services.items():
            assert service - least <= (quantum + 1024) / world.weights[run] + 1e-6
            assert service >= last.get(run, 0.0)
        last.update(services)
        assert plan.pieces

    assert len(simulate(world, "fair", watch=watch)) == 3 * len(made)
