"""What fails in the learner is one command or one run, by name; only a device step that fails ends the learner, with every future settled."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from learner_builders import drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, tiny

from noria.errors import InvalidRequestError, StageStoppedError, StateConflictError, TreeTooLargeError
from noria.types import LossSpec, OptimizerSpec

BATCH = random_groups(3, num_groups=3)


def learner_with_a_run():
    learner = make_learner(num_slots=2)
    learner.load_run(spec("mine"), nonzero_state(7, spec("mine")))
    drain(learner)
    return learner


def trained(learner, run_id="mine", groups=BATCH):
    future = learner.train(run_id, pieces_of(groups))
    drain(learner)
    return future.result(0).state


@pytest.fixture(scope="module")
def undisturbed():
    return trained(learner_with_a_run())


def damaged(change):
    """A state whose moments or parameters are not what the learner's arrays hold."""
    state = nonzero_state(1, spec("new"))
    copies = jax.tree.map(np.copy, state)
    return change(copies) or copies


def without(tree, side, module):
    del tree[side][module]


def reshaped(tree, side, module, leaf):
    tree[side][module] = leaf


COMMANDS = {
    "ids longer than the axis": (lambda x: x.score_ids("mine", (5,) * 400), TreeTooLargeError),
    "ids outside the vocabulary": (lambda x: x.score_ids("mine", (5, tiny()[0].vocab_size)), InvalidRequestError),
    "negative ids": (lambda x: x.score_ids("mine", (5, -1)), InvalidRequestError),
    "ids that are no numbers": (lambda x: x.score_ids("mine", ("a", "b")), InvalidRequestError),
    "a batch cut for a larger axis": (lambda x: x.train("mine", pieces_of(random_groups(1, num_groups=9, prompt=60), 1024)), TreeTooLargeError),
    "a batch that is no batch": (lambda x: x.train("mine", [None]), InvalidRequestError),
    "a batch of an unknown loss": (lambda x: x.train("mine", pieces_of(BATCH), loss=LossSpec(kind="mse")), InvalidRequestError),
    "a batch of a loss that is no number": (lambda x: x.train("mine", pieces_of(BATCH), loss=LossSpec(tis_cap="two")), InvalidRequestError),
    "a batch of an unknown schedule": (
        lambda x: x.train("mine", pieces_of(BATCH), optimizer=OptimizerSpec(1.0, schedule="step")),
        InvalidRequestError,
    ),
    "no such run": (lambda x: x.train("ghost", pieces_of(BATCH)), StateConflictError),
    "a moment without a module": (lambda x: x.load_run(spec("new"), damaged(lambda s: without(s.first_moment, "a", "q"))), StateConflictError),
    "a moment without a side": (lambda x: x.load_run(spec("new"), damaged(lambda s: s.second_moment.pop("b") and None)), StateConflictError),
    "an unknown module": (lambda x: x.load_run(spec("new"), damaged(lambda s: reshaped(s.params, "a", "z", np.zeros(1)))), StateConflictError),
    "another rank class": (lambda x: x.load_run(spec("new"), nonzero_state(1, spec("new"), max_rank=16)), StateConflictError),
    "doubles": (
        lambda x: x.load_run(spec("new"), damaged(lambda s: reshaped(s.second_moment, "a", "q", s.params["a"]["q"].astype(float)))),
        StateConflictError,
    ),
    "a scalar moment": (lambda x: x.load_run(spec("new"), damaged(lambda s: reshaped(s.first_moment, "b", "o", np.float32(0)))), StateConflictError),
    "no moments": (lambda x: x.load_run(spec("new"), damaged(lambda s: s._replace(first_moment=None))), StateConflictError),
    "a rate that is no number": (
        lambda x: x.load_run(replace(spec("new"), optimizer=replace(spec("new").optimizer, learning_rate="fast")), nonzero_state(1, spec("new"))),
        InvalidRequestError,
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_command_fails_its_own_future_and_changes_nothing(undisturbed, name):
    """Fed in the middle of another run's batch; afterwards all slots are still there and the batch's bytes are those it has without it."""
    command, error = COMMANDS[name]
    learner = learner_with_a_run()
    if name.startswith("a batch"):
        bad = command(learner)
        drain(learner)
        going = learner.train("mine", pieces_of(BATCH))
    else:
        going = learner.train("mine", pieces_of(BATCH))
        learner.step()
        bad = command(learner)
    drain(learner)
    with pytest.raises(error):
        bad.result(0)
    assert same_bytes(going.result(0).state, undisturbed)
    more = [learner.load_run(spec(run_id), nonzero_state(1, spec(run_id))) for run_id in ("new", "beyond the slots")]
    drain(learner)
    assert [loaded.result(0) for loaded in more] == [None, None]


def test_a_command_that_took_the_devices_state_with_it_ends_the_learner_and_every_future_is_settled():
    learner = learner_with_a_run()
    going = learner.train("mine", pieces_of(BATCH))
    learner.step()
    learner.step()  # scored and pulled
    jax.tree.leaves(learner._passes.residency.slots(8))[0].delete()  # as a program that failed after its inputs were donated leaves them
    loading = learner.load_run(spec("new"), nonzero_state(1, spec("new")))
    after = learner.score_ids("mine", (5, 6))
    with pytest.raises(RuntimeError, match="deleted") as failure:
        learner.step()
    with pytest.raises(RuntimeError, match="deleted"):
        loading.result(0)
    learner.fail(failure.value)
    late = learner.train("mine", pieces_of(BATCH))
    for future in (going, after, late):
        with pytest.raises(StageStoppedError, match="deleted"):
            future.result(0)
    assert not learner.has_work


def test_a_step_that_fails_on_the_device_leaves_its_batch_to_fail():
    learner = learner_with_a_run()
    going = learner.train("mine", pieces_of(BATCH))
    learner.step()
    while learner._busy["mine"].barrier is None:
        learner.step()
    jax.tree.leaves(learner._passes.residency.slots(8).second_moment)[0].delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted") as failure:
        learner.step()
    assert not going.done()
    learner.fail(failure.value)
    with pytest.raises(StageStoppedError):
        going.result(0)


@pytest.mark.parametrize("num_neighbours", [0, 1])
def test_a_run_stopped_between_score_and_pull_leaves_its_neighbours_and_its_slots_next_owner_alone(undisturbed, num_neighbours):
    learner = make_learner(512, num_slots=1 + num_neighbours)
    for run_id in ["mine", "gone"][-1 - num_neighbours :]:
        learner.load_run(spec(run_id), nonzero_state(7 if run_id == "mine" else 2, spec(run_id)))
    mine = learner.train("mine", pieces_of(BATCH)) if num_neighbours else None
    gone = learner.train("gone", pieces_of(random_groups(5, num_groups=2)))
    learner.step()
    assert {planned.run_id for planned in learner._passes.scored.plan.pieces} == {"mine", "gone"} - (set() if num_neighbours else {"mine"})
    learner.unload_run("gone")
    learner.load_run(spec("next"), nonzero_state(7, spec("next")))
    assert same_bytes(trained(learner, "next"), undisturbed)
    with pytest.raises(StageStoppedError, match="gone was stopped"):
        gone.result(0)
    if mine is not None:
        assert same_bytes(mine.result(0).state, undisturbed)


def test_spans_name_the_run_of_a_pass_that_is_one_runs_and_nobody_for_a_shared_one():
    learner = make_learner(512, num_slots=2)
    for run_id in ("a", "b"):
        learner.load_run(spec(run_id), nonzero_state(1, spec(run_id)))
    small = random_groups(3, num_groups=1)
    futures = [learner.train(run_id, pieces_of(small)) for run_id in ("a", "b")]
    drain(learner)
    trained(learner, "a", small)
    totals = {(total.name, total.run_id): total.num_spans for total in learner._passes._spans.snapshot()}
    expected = {(name, run_id): 1 for name in ("score", "pull") for run_id in ("", "a")}
    assert totals == expected | {("optimize", "a"): 2, ("optimize", "b"): 1}
    assert all(future.result(0).device_s > 0 for future in futures)
