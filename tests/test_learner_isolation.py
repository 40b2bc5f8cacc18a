"""Isolation, the stop-ship tests: neighbours, microbatch splits and idle slots never change a bit of a run's training."""

import jax
import numpy as np
import pytest
from jax import monitoring
from learner_builders import drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, state_of, tiny

from noria.errors import GradientNotFiniteError, InvalidRequestError, StateConflictError
from noria.model.transformer import forward_logits


def load(learner, run_id, seed, **kwargs):
    run_spec = spec(run_id, **kwargs)
    learner.load_run(run_spec, nonzero_state(seed, run_spec))
    drain(learner)


def train_alone(batches, max_positions=256):
    learner = make_learner(max_positions)
    load(learner, "mine", 7)
    for groups in batches:
        future = learner.train("mine", pieces_of(groups))
        drain(learner)
        state = future.result(0).state
    return state


BATCHES = [random_groups(seed, num_groups=5, prompt=40, turns=2) for seed in (11, 12, 13)]


@pytest.fixture(scope="module")
def alone():
    return train_alone(BATCHES)


@pytest.mark.parametrize("order", [("mine", "big", "small"), ("big", "small", "mine")])
def test_a_run_trains_to_the_same_bytes_beside_neighbours(alone, order):
    learner = make_learner(512)
    for run_id in order:
        load(learner, run_id, 7 if run_id == "mine" else len(run_id), rank=4 if run_id == "mine" else 8)
    before = learner.num_microbatches
    for step, groups in enumerate(BATCHES):
        futures = {}
        for run_id in order:
            other = random_groups(100 + step, num_groups=9 if run_id == "big" else 2, prompt=60)
            futures[run_id] = learner.train(run_id, pieces_of(groups if run_id == "mine" else other))
        drain(learner)
        state = futures["mine"].result(0).state
    assert learner.num_microbatches - before < 3 * 3 * 2, "runs must share microbatches"
    assert same_bytes(state, alone)


def test_a_run_trains_to_the_same_bytes_beside_runs_of_other_rank_classes(alone):
    learner = make_learner(256, rank_classes=(8, 32))
    load(learner, "mine", 7)
    for run_id, rank, width in (("same", 8, 8), ("wide", 20, 32)):
        run_spec = spec(run_id, rank=rank)
        learner.load_run(run_spec, nonzero_state(rank, run_spec, max_rank=width))
    for step, groups in enumerate(BATCHES):
        futures = [learner.train(run_id, pieces_of(random_groups(100 + step, num_groups=2))) for run_id in ("wide", "same")]
        futures.append(learner.train("mine", pieces_of(groups)))
        drain(learner)
        state = [future.result(0).state for future in futures][-1]
    assert same_bytes(state, alone)


@pytest.mark.parametrize("stall_positions", [64, 128, 256])
def test_a_run_trains_to_the_same_bytes_over_any_microbatch_split(monkeypatch, stall_positions):
    """Pieces are cut for 64 positions; passes of one to four pieces add up to the same bits."""
    states, passes = [], []
    for limit in (256, stall_positions):
        learner = make_learner(256)
        monkeypatch.setattr(learner._passes.pace, "max_positions", lambda largest, limit=limit: limit)
        load(learner, "mine", 7)
        for groups in BATCHES:
            pieces = pieces_of(groups, 64 * 2)
            future = learner.train("mine", pieces)
            drain(learner)
            states.append(future.result(0).state) if groups is BATCHES[-1] else None
        assert len(pieces) > 2
        passes.append(learner.num_microbatches)
    assert same_bytes(*states)
    assert passes[1] >= passes[0]
    assert stall_positions == 256 or passes[1] > passes[0]


def test_idle_slots_are_untouched_by_a_neighbours_step():
    learner = make_learner()
    load(learner, "idle", 1, weight_decay=0.5)
    load(learner, "busy", 2, weight_decay=1.0)
    learner.train("idle", pieces_of(random_groups(1)))
    drain(learner)
    before = state_of(learner, "idle")
    for seed in range(3):
        learner.train("busy", pieces_of(random_groups(seed)))
        drain(learner)
    assert same_bytes(state_of(learner, "idle"), before)


def test_a_neighbours_nan_stays_its_own():
    """The NaN run's step is refused and leaves its adapter; the other run's bytes are those it has alone."""
    learner = make_learner(512)
    load(learner, "mine", 7)
    run_spec = spec("broken")
    state = nonzero_state(1, run_spec)
    state.params["a"]["q"][0, 0, 0] = np.nan
    learner.load_run(run_spec, state)
    for groups in BATCHES:
        mine, broken = learner.train("mine", pieces_of(groups)), learner.train("broken", pieces_of(groups))
        drain(learner)
        with pytest.raises(GradientNotFiniteError, match="broken"):
            broken.result(0)
    assert same_bytes(mine.result(0).state, train_alone(BATCHES))
    assert same_bytes(state_of(learner, "broken"), state)


def test_small_ranks_and_untrained_modules_stay_zero_in_their_padding():
    learner = make_learner()
    load(learner, "run", 3, rank=2)
    state = learner.train("run", pieces_of(random_groups(5)))
    drain(learner)
    for tree in state.result(0).state[:3]:
        assert all((leaf[:, :, 2:] == 0).all() and (leaf[:, :, :2] != 0).any() for leaf in tree["a"].values())
        assert all((leaf[:, 2:] == 0).all() and (leaf[:, :2] != 0).any() for leaf in tree["b"].values())


def test_a_run_reloaded_into_another_slot_continues_bit_for_bit(alone):
    learner = make_learner()
    load(learner, "mine", 7)
    state = nonzero_state(7, spec("mine"))
    for groups in BATCHES:
        learner.unload_run("mine")
        load(learner, f"filler{groups[0].group_id}", 1)
        learner.load_run(spec("mine"), state)
        future = learner.train("mine", pieces_of(groups))
        drain(learner)
        state = future.result(0).state
        learner.unload_run(f"filler{groups[0].group_id}")
    assert same_bytes(state, alone)


@pytest.mark.slow
def test_no_program_is_compiled_after_warm_up_over_300_random_batches():
    compiled = []

    def listen(event, seconds, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs.get("fun_name", "?"))

    learner = make_learner(512, num_slots=4)
    learner.warm_up()
    monitoring.register_event_duration_secs_listener(listen)
    try:
        for slot in range(3):
            load(learner, f"run{slot}", slot, rank=2 + slot)
        rng = np.random.default_rng(0)
        for step in range(100):
            for slot in range(3):
                groups = random_groups(
                    1000 + 3 * step + slot, num_groups=int(rng.integers(1, 7)), prompt=int(rng.integers(4, 60)), turns=int(rng.integers(1, 3))
                )
                if pieces := pieces_of(groups, 512):
                    learner.train(f"run{slot}", pieces)
            drain(learner)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert learner.num_microbatches > 100
    assert compiled == []


def test_bad_requests_to_the_learner_are_refused_with_named_errors():
    learner = make_learner(num_slots=2)
    load(learner, "a", 1)
    load(learner, "b", 2)
    cases = [
        (learner.load_run(spec("a"), nonzero_state(1, spec("a"))), StateConflictError),
        (learner.load_run(spec("c", rank=9), nonzero_state(1, spec("c"))), StateConflictError),
        (learner.train("unknown", pieces_of(random_groups(1))), StateConflictError),
        (learner.train("a", ()), InvalidRequestError),
        (learner.score_ids("a", (5,)), InvalidRequestError),
    ]
    drain(learner)
    for future, error in cases:
        with pytest.raises(error):
            future.result(0)
    good = learner.train("a", pieces_of(random_groups(1)))
    drain(learner)
    assert good.result(0).state.num_steps == 1


def test_scored_ids_equal_the_reference_forward_pass():
    config, base = tiny()
    learner = make_learner()
    run_spec = spec("run")
    state = nonzero_state(1, run_spec)
    for leaf in state.params["b"].values():
        leaf[:] = 0
    learner.load_run(run_spec, state)
    ids = tuple(int(i) for i in np.random.default_rng(0).integers(0, 250, 50))
    future = learner.score_ids("run", ids)
    drain(learner)
    log_p = jax.nn.log_softmax(forward_logits(base.stacked, config, np.array(ids, np.int32)), -1)
    np.testing.assert_allclose(future.result(0), np.asarray(log_p)[np.arange(49), ids[1:]], rtol=1e-4, atol=1e-5)
