"""Evaluation of a pinned version: how often each task is tried and with which draws, and how pass@k, means and failures are counted."""

from itertools import combinations

import pytest
from actor_builders import ScriptedSampler, rules_for, seams_for
from hypothesis import given
from hypothesis import strategies as st

from noria.actors.evaluation import evaluate, held_out_tasks, pass_at_k
from noria.actors.room import Room
from noria.clock import VirtualClock
from noria.errors import EnvironmentFailedError
from noria.observe import SpanRecorder
from noria.protocols import Step


class Marks:
    """Task i, tried for the n-th time, is worth marks[i][n]; None: it raises."""

    num_tasks, num_held_out = 8, 4

    def __init__(self, marks):
        self.marks, self.tries = marks, {}

    def __call__(self):
        return Sitting(self)


class Sitting:
    def __init__(self, book):
        self.book = book

    def reset(self, task):
        self.index = task.index - Marks.num_tasks
        return "go"

    def step(self, action):
        number = self.book.tries[self.index] = self.book.tries.get(self.index, -1) + 1
        marks = self.book.marks[self.index]
        mark = marks[min(number, len(marks) - 1)]
        if mark is None:
            raise ValueError("no mark")
        return Step(mark)


def played(marks, *, version=3, tries=1, temperature=1.0, seed=7, solved_at=1.0):
    """The result, and the requests of the sampler."""
    clock = VirtualClock()
    sampler, environment = ScriptedSampler(clock, ["x\n"]), Marks(marks)
    seams = seams_for(sampler, clock)
    rules = rules_for(None, environment=environment, seed=seed, version=version, temperature=temperature)
    tasks = held_out_tasks(environment, len(marks))
    room = Room(64, SpanRecorder(clock))
    try:
        work = evaluate(seams, rules, tasks, samples=len(marks[0]), solved_at=solved_at, name="e", tries=tries, room=room)
        return clock.run(work), sampler.requests
    finally:
        seams.threads.shutdown()
        seams.loops.shutdown()


def test_every_task_weighs_the_same_whatever_part_of_its_samples_failed():
    result, _ = played([[1.0, 1.0, 0.0, 0.5], [None, 1.0, None, None], [0.0, 0.0, 0.0, 0.0], [None] * 4])
    assert result.accuracy == pytest.approx((2 / 4 + 1 / 1 + 0) / 3)
    assert result.mean_reward == pytest.approx((2.5 / 4 + 1 + 0) / 3)
    assert result.num_failed == 7
    assert [sorted(map(str, row)) for row in result.rewards][1] == ["1.0", "None", "None", "None"]


def test_pass_at_k_is_over_the_tasks_that_have_k_samples():
    result, _ = played([[1.0, 1.0, 0.0, 0.5], [None, 1.0, None, None], [0.0, 0.0, 0.0, 0.0], [None] * 4])
    assert list(result.pass_at) == [1, 2, 4]
    assert result.pass_at[1] == pytest.approx(result.accuracy)
    assert result.pass_at[2] == pytest.approx((5 / 6 + 0) / 2)
    assert result.pass_at[4] == pytest.approx((1 + 0) / 2)
    assert list(played([[1.0, None, None, None]])[0].pass_at) == [1], "no task has two samples"
    assert list(played([[0.0, 0.0, 0.0]])[0].pass_at) == [1, 2], "k goes up in powers of two"


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_solved_sample(numbers):
    num_samples, num_solved, k = numbers
    chosen = list(combinations([n < num_solved for n in range(num_samples)], k))
    assert pass_at_k(num_samples, num_solved, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


def test_draws_depend_on_seed_task_and_sample_and_not_on_the_version():
    marks = [[0.0] * 3] * 4
    seeds = {request.params.seed for request in played(marks, version=3)[1]}
    assert len(seeds) == 12
    assert seeds == {request.params.seed for request in played(marks, version=9)[1]}
    assert not seeds & {request.params.seed for request in played(marks, seed=8)[1]}


def test_all_requests_are_pinned_at_the_evaluations_temperature_and_their_episodes_are_distinct():
    _, requests = played([[1.0, 0.0]] * 4, version=5, temperature=0.6)
    assert {(r.version, r.params.temperature) for r in requests} == {(5, 0.6)}
    assert len({r.episode_id for r in requests}) == 8


def test_a_failed_sample_is_tried_again_with_the_same_draw():
    result, requests = played([[None, 1.0, 1.0]], tries=4)
    assert (result.num_failed, result.accuracy, len(requests)) == (0, 1.0, 4)
    assert len({request.params.seed for request in requests}) == 3


def test_an_evaluation_of_which_every_episode_failed_is_an_error():
    with pytest.raises(EnvironmentFailedError, match=r"all 2 tasks failed; the first: .*no mark"):
        played([[None] * 2] * 2)


def test_what_counts_as_solved_is_the_run_files():
    marks = [[0.5, 0.75], [0.25, 0.5]]
    assert (played(marks, solved_at=0.5)[0].accuracy, played(marks, solved_at=0.75)[0].accuracy, played(marks)[0].accuracy) == (0.75, 0.25, 0.0)
    assert played(marks, solved_at=0.5)[0].pass_at == {1: 0.75, 2: 1.0}
    assert played([[-1.0], [-2.0]], solved_at=-1.5)[0].accuracy == 0.5, "any number may be the mark"
