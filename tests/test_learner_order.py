"""A run's operations happen in the order of submission, whoever waits for what: unawaited they come to the same bits as one after another."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_builders import drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, state_of

from noria.errors import GradientNotFiniteError, StageStoppedError, StateConflictError
from noria.types import LossSpec, OptimizerSpec

BATCHES = [pieces_of(random_groups(seed, num_groups=3, prompt=40), 128) for seed in (1, 2, 3)]
OTHER = [pieces_of(random_groups(10 + seed, num_groups=2, prompt=30), 128) for seed in range(3)]
ORDER = ("fb0", "fb1", "o", "fb2", "o")


def learner_with(*run_ids):
    learner = make_learner(256)
    for run_id in run_ids:
        learner.load_run(spec(run_id), nonzero_state(7 if run_id == "mine" else len(run_id), spec(run_id)))
    drain(learner)
    return learner


def submit(learner, run_id, name, batches=BATCHES):
    if name == "o":
        return learner.optim_step(run_id)
    call = learner.forward_backward if name.startswith("fb") else learner.forward
    return call(run_id, batches[int(name[-1])])


@pytest.fixture(scope="module")
def awaited():
    learner = learner_with("mine")
    results = []
    for name in ORDER:
        future = submit(learner, "mine", name)
        drain(learner)
        results.append(future.result(0))
    return results, state_of(learner, "mine")


def test_unawaited_operations_equal_awaited_ones_beside_other_runs(awaited):
    results, state = awaited
    learner = learner_with("mine", "other", "third")
    futures, done = [], []
    for step, name in enumerate(ORDER):
        futures.append(submit(learner, "mine", name))
        futures[-1].add_done_callback(lambda _, step=step: done.append(step))
        submit(learner, "other", name, OTHER)
        if step % 2:
            learner.train("third", OTHER[step % 3])
            learner.step()
    drain(learner)
    assert done == list(range(len(ORDER)))
    assert same_bytes(state_of(learner, "mine"), state)
    for future, want in zip(futures, results, strict=True):
        got = future.result(0)
        for name in ("outputs", "cotangents", "grad_norm", "num_steps"):
            if hasattr(want, name):
                got_part, want_part = (dataclasses.astuple(getattr(r, name)) if name[0] in "oc" else getattr(r, name) for r in (got, want))
                assert same_bytes(got_part, want_part)


@settings(max_examples=8, deadline=None)
@given(st.permutations(["f0", "f1"] * 2), st.integers(0, 5))
def test_forwards_anywhere_between_barriers_change_nothing(awaited, forwards, seed):
    rng = np.random.default_rng(seed)
    learner = learner_with("mine", "other")
    before = {name: submit(learner, "mine", name) for name in ("f0", "f1")}
    plan = list(ORDER)
    for name in forwards:
        plan.insert(int(rng.integers(0, len(plan) + 1)), name)
    for name in plan:
        submit(learner, "mine", name)
    drain(learner)
    assert same_bytes(state_of(learner, "mine"), awaited[1])
    assert same_bytes(before["f0"].result(0).outputs.learner_logprobs_M, awaited[0][0].outputs.learner_logprobs_M)
    assert not before["f0"].result(0).cotangents.learner_logprobs_M.any()
    assert before["f1"].result(0).metrics == pytest.approx(awaited[0][1].metrics, rel=1e-5, abs=1e-6)


def test_train_is_forward_backward_optim_step_and_save():
    learner = learner_with("mine", "same")
    learner.load("same", nonzero_state(7, spec("mine")))
    whole = learner.train("mine", BATCHES[0])
    batch, optim, state = learner.forward_backward("same", BATCHES[0]), learner.optim_step("same"), learner.save("same")
    drain(learner)
    step = whole.result(0)
    assert same_bytes(step.state, state.result(0))
    assert (step.grad_norm, step.learning_rate) == (optim.result(0).grad_norm, optim.result(0).learning_rate)
    assert step.num_entries == batch.result(0).num_entries == sum(len(piece.entries) for piece in BATCHES[0])
    assert step.metrics == pytest.approx(batch.result(0).metrics, rel=1e-5)
    assert step.device_s > 0


def test_load_and_save_are_barriers_and_load_clears_the_pending_gradient():
    learner, start = learner_with("mine"), nonzero_state(3, spec("mine"))
    learner.forward_backward("mine", BATCHES[0])
    first = learner.save("mine")
    learner.load("mine", start)
    second = learner.save("mine")
    after = learner.train("mine", BATCHES[1])
    drain(learner)
    assert same_bytes(first.result(0), nonzero_state(7, spec("mine")))
    assert same_bytes(second.result(0), start)
    fresh = make_learner(256)
    fresh.load_run(spec("mine"), start)
    want = fresh.train("mine", BATCHES[1])
    drain(fresh)
    assert same_bytes(after.result(0).state, want.result(0).state)


def test_a_step_whose_gradient_is_not_finite_fails_alone_and_leaves_nothing_pending(awaited):
    learner = learner_with("mine", "other")
    too_much = LossSpec(kind="linear")
    entries = BATCHES[0][0].entries
    broken = (dataclasses.replace(BATCHES[0][0], entries=dataclasses.replace(entries, advantage_M=np.full_like(entries.advantage_M, np.inf))),)
    bad = learner.forward_backward("mine", broken, too_much)
    refused = learner.optim_step("mine")
    futures = [submit(learner, "mine", name) for name in ORDER]
    whole = learner.train("other", broken, loss=too_much)
    drain(learner)
    assert bad.result(0).num_entries == len(entries)
    for failed in (refused, whole):
        with pytest.raises(GradientNotFiniteError, match="adapter is unchanged"):
            failed.result(0)
    assert [future.result(0) for future in futures][-1].num_steps == 2
    assert same_bytes(state_of(learner, "mine"), awaited[1])
    assert same_bytes(state_of(learner, "other"), nonzero_state(5, spec("other")))


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_unloading_a_run_fails_exactly_its_futures(num_steps):
    learner = learner_with("mine", "gone")
    mine = learner.train("mine", BATCHES[0])
    gone = [learner.train("gone", BATCHES[0]), *(submit(learner, "gone", name) for name in ORDER), learner.save("gone")]
    for _ in range(num_steps):
        learner.step()
    learner.unload_run("gone")
    late = learner.forward("gone", BATCHES[0])
    drain(learner)
    for future in gone:
        with pytest.raises(StageStoppedError, match="gone was stopped"):
            future.result(0)
    with pytest.raises(StateConflictError, match="not loaded"):
        late.result(0)
    alone = learner_with("mine")
    want = alone.train("mine", BATCHES[0])
    drain(alone)
    assert same_bytes(mine.result(0).state, want.result(0).state)


def test_one_request_is_served_within_a_turn_of_a_run_that_floods_the_queue():
    """Case 97: 500 operations of one run, of any kind, do not keep another one waiting."""
    for name in ("f0", "o", "save"):
        learner = learner_with("flood", "other")
        for _ in range(500):
            learner.save("flood") if name == "save" else submit(learner, "flood", name)
        learner.step()
        asked = learner.forward("other", OTHER[0])
        steps = 0
        while not asked.done():
            learner.step()
            steps += 1
        assert steps <= len(BATCHES[0]) + len(OTHER[0]) + 2, name
        learner.unload_run("flood")
        drain(learner)


def test_the_gradient_that_is_pending_can_be_looked_at():
    learner = learner_with("mine")
    learner.forward_backward("mine", BATCHES[0], LossSpec(sequence_mask_c=0.0))
    drain(learner)
    before = learner.pending_gradient("mine")
    step = learner.optim_step("mine", OptimizerSpec(0.0))
    drain(learner)
    after = learner.pending_gradient("mine")
    drain(learner)
    norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(before.result(0))))
    assert step.result(0).grad_norm == pytest.approx(norm, rel=1e-5)
    assert not any(leaf.any() for leaf in jax.tree.leaves(after.result(0)))
