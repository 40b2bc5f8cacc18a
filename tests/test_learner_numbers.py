"""Operations that carry numbers are executed in their order, however they come; and a step is taken from all of its passes or not at all."""

import dataclasses
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_builders import drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, state_of

from noria.errors import GradientNotFiniteError, NoriaError, OperationFailedError, StageStoppedError, StateConflictError, TreeTooLargeError
from noria.types import OptimizerSpec

BATCHES = [pieces_of(random_groups(seed, num_groups=3, prompt=40), 128) for seed in (1, 2, 3)]
OTHER = pieces_of(random_groups(10, num_groups=2, prompt=30), 128)
SMALL = pieces_of(random_groups(11, num_groups=1, prompt=20), 128)
TOO_LARGE = pieces_of(random_groups(4, num_groups=1, prompt=600), 1024)
ORDER = ("fb0", "fb1", "o", "fb2", "o")


def learner_with(*run_ids, first_seq=0):
    learner = make_learner(256)
    for run_id in run_ids:
        run_spec = dataclasses.replace(spec(run_id), first_seq=first_seq)
        learner.load_run(run_spec, nonzero_state(7, run_spec))
    drain(learner)
    return learner


def submit(learner, name, *, run_id="mine", seq=None):
    if name == "o":
        return learner.optim_step(run_id, seq=seq)
    return learner.forward_backward(run_id, TOO_LARGE if name == "bad" else BATCHES[int(name[-1])], seq=seq)


def run_to_end(names):
    """The run's state after these operations, each awaited."""
    learner = learner_with("mine")
    for name in names:
        submit(learner, name)
        drain(learner)
    return state_of(learner, "mine")


@pytest.fixture(scope="module")
def awaited():
    return run_to_end(ORDER)


@settings(max_examples=12, deadline=None)
@given(st.permutations(range(len(ORDER))), st.lists(st.booleans(), min_size=len(ORDER), max_size=len(ORDER)), st.sampled_from([0, 7]))
def test_operations_in_any_order_of_arrival_come_to_the_bits_of_awaited_ones(awaited, arrival, is_stepped, first):
    """`fb1 fb2 o1 fb3 o2`, unawaited, reversed and shuffled, beside another run."""
    learner = learner_with("mine", "other", first_seq=first)
    done = []
    for seq, step in zip(arrival, is_stepped, strict=True):
        submit(learner, ORDER[seq], seq=first + seq).add_done_callback(lambda _, seq=seq: done.append(seq))
        learner.train("other", OTHER)
        if step:
            learner.step()
    drain(learner)
    assert done == list(range(len(ORDER)))
    assert same_bytes(state_of(learner, "mine"), awaited)


def test_a_number_is_taken_once_and_one_that_never_comes_can_be_skipped():
    learner = learner_with("mine")
    first, early = submit(learner, "fb0", seq=0), submit(learner, "o", seq=2)
    again, early_again = submit(learner, "fb1", seq=0), submit(learner, "fb1", seq=2)
    drain(learner)
    assert first.result(0).num_entries
    assert not early.done()
    for future in (again, early_again):
        with pytest.raises(StateConflictError, match="was submitted before"):
            future.result(0)
    skipped, twice = learner.skip("mine", 1), learner.skip("mine", 1)
    drain(learner)
    assert skipped.result(0) is None
    assert early.result(0).num_steps == 1
    with pytest.raises(StateConflictError):
        twice.result(0)


def test_what_waits_for_a_number_fails_with_its_run():
    learner = learner_with("mine")
    early = submit(learner, "o", seq=3)
    learner.unload_run("mine")
    drain(learner)
    with pytest.raises(StageStoppedError):
        early.result(0)


@pytest.mark.parametrize("is_numbered", [False, True])
@pytest.mark.parametrize("names", [("fb0", "bad", "o"), ("bad", "fb0", "o"), ("bad", "o")])
def test_a_step_that_would_lack_a_part_is_not_taken_and_leaves_nothing_pending(awaited, names, is_numbered):
    learner = learner_with("mine")
    futures = {name: submit(learner, name, seq=seq if is_numbered else None) for seq, name in enumerate(names)}
    drain(learner)
    with pytest.raises(TreeTooLargeError):
        futures["bad"].result(0)
    with pytest.raises(StateConflictError, match="a forward_backward that it would have been taken from failed: a piece of"):
        futures["o"].result(0)
    assert same_bytes(state_of(learner, "mine"), nonzero_state(7, spec("mine")))
    for name in ORDER:
        submit(learner, name, seq=None)
    drain(learner)
    assert same_bytes(state_of(learner, "mine"), awaited)


def test_a_refused_forward_is_no_part_of_a_step():
    learner = learner_with("mine")
    good, refused, step = submit(learner, "fb0"), learner.forward("mine", TOO_LARGE), submit(learner, "o")
    drain(learner)
    assert good.result(0).num_entries
    assert isinstance(refused.exception(0), TreeTooLargeError)
    assert step.result(0).num_steps == 1


@pytest.mark.parametrize("failing", ["nan", "too large"])
def test_a_batch_that_fails_as_a_whole_spoils_no_later_one(failing):
    learner = learner_with("mine")
    batch, optimizer = (BATCHES[0], OptimizerSpec(float("nan"))) if failing == "nan" else (TOO_LARGE, None)
    bad, good = learner.train("mine", batch, optimizer=optimizer), learner.train("mine", BATCHES[1])
    drain(learner)
    assert isinstance(bad.exception(0), NoriaError | GradientNotFiniteError)
    want = learner_with("mine")
    alone = want.train("mine", BATCHES[1])
    drain(want)
    assert same_bytes(good.result(0).state, alone.result(0).state)


@pytest.mark.parametrize("guilty", ["mine", "other", None])
def test_a_dispatch_that_fails_on_the_device_fails_the_run_that_is_to_blame(monkeypatch, caplog, guilty):
    """Out of memory, say, in a pass that two runs share: they are tried apart, and only one that fails alone has failed."""
    learner = learner_with("mine", "other")
    score, num_failures = learner._passes.score, []

    def exhausted(plan, owners, mode, slot_of):
        if (guilty is None and not num_failures) or guilty in slot_of:
            num_failures.append(sorted(slot_of))
            raise MemoryError("no room on the device")
        return score(plan, owners, mode, slot_of)

    monkeypatch.setattr(learner._passes, "score", exhausted)
    with caplog.at_level(logging.CRITICAL):
        futures = {run_id: learner.train(run_id, SMALL) for run_id in ("mine", "other")}
        drain(learner)
    assert num_failures[0] == ["mine", "other"]
    alone = learner_with("mine")
    want = alone.train("mine", SMALL)
    drain(alone)
    for run_id, future in futures.items():
        if run_id == guilty:
            assert isinstance(future.exception(0), OperationFailedError)
            assert isinstance(future.exception(0).__cause__, MemoryError)
        else:
            assert same_bytes(future.result(0).state, want.result(0).state)
    monkeypatch.undo()
    later = {run_id: learner.train(run_id, BATCHES[0]) for run_id in futures}
    drain(learner)
    assert all(future.result(0).num_entries for future in later.values())


def test_barriers_that_fail_hold_nobody_up():
    """A run whose loads all fail is served as one whose loads work: 300 of them do not go before another run's batch."""
    learner = learner_with("mine", "other")
    broken = nonzero_state(7, spec("other"), max_rank=16)
    learner.forward_backward("other", OTHER)
    loads = [learner.load("other", broken) for _ in range(300)]
    batch = learner.train("mine", BATCHES[0])
    steps = 0
    while not batch.done():
        learner.step()
        steps += 1
    drain(learner)
    assert all(isinstance(future.exception(0), StateConflictError) for future in loads)
    assert steps < 60


def test_probes_do_not_keep_a_batch_from_its_turn():
    learner = learner_with("mine")
    probes = [learner.score_ids("mine", (1, 2, 3)) for _ in range(50)]
    batch = learner.train("mine", BATCHES[0])
    while not batch.done():
        learner.step()
    assert sum(future.done() for future in probes) < 50
    drain(learner)
    assert all(len(future.result(0)) == 2 for future in probes)
