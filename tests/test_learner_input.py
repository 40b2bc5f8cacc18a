"""What callers hand to the learner is exact or refused by name: no input ends a step, moves a neighbour's bits, or trains silently wrong."""

import dataclasses
from hashlib import sha256
from random import Random

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from learner_builders import ALGORITHM, drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, tiny

from noria.errors import GradientNotFiniteError, InvalidRequestError, NoriaError, TreeTooLargeError
from noria.learner.arrays import exact
from noria.learner.batches import COLUMNS, BatchPlanner, of_walk
from noria.learner.checks import Sizes, batch_of, check, cotangents_of
from noria.learner.executors import Job, is_whole, whole_sizes
from noria.learner.operations import EntryOutputs, Forward
from noria.learner.step import loss_cotangents
from noria.rl.chunks import plan_replay
from noria.rl.losses import LossInputs
from noria.rl.packing import microbatch_shape
from noria.rl.tree import build_tree
from noria.types import Entries, LoraSpec, LossSpec, OptimizerSpec, Piece

EVERY = ALGORITHM.model_copy(update={"zero_signal": "train"})
TREE, _ = build_tree(random_groups(4, num_groups=3, prompt=40, answer=8, turns=2), EVERY)
SMALL, _ = build_tree(random_groups(4, num_groups=1, prompt=20, answer=6, turns=2), EVERY)  # two fit in half a microbatch
NUM = len(TREE.entries)
LONG, _ = build_tree(random_groups(5, num_groups=1, group_size=4, prompt=900, answer=60), EVERY)
START = nonzero_state(7, spec("mine"))
VOCAB = tiny()[0].vocab_size
SEQUENCE_M = np.unique(TREE.entries.sequence_M, return_inverse=True)[1].astype(np.int32)
PAIR_M = SEQUENCE_M % (SEQUENCE_M.max() // 2 + 1)
RNG = np.random.default_rng(0)


def learner_with(*run_ids, max_positions=256, **changes):
    """A learner with these runs; with room for values, so that all tests here share their programs."""
    learner = make_learner(max_positions, has_values=True, **changes)
    for run_id in run_ids:
        learner.load_run(spec(run_id), START)
    return learner


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# ---- columns --------------------------------------------------------------------------------------------------------------------------


def critic(run_id):
    return dataclasses.replace(spec(run_id), lora=LoraSpec(4, 8.0, train_value=True))


def columns_of(dtype, low):
    count = len(SMALL.entries)
    return {"returns_M": np.linspace(low, low + 1.8, count).astype(dtype), "behavior_values_M": np.zeros(count, dtype)}


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.float16, np.bool_])
def test_a_neighbours_column_of_another_dtype_leaves_a_runs_bits_alone(dtype):
    """Whole numbers first in the pass would cut off what stands behind the point of those that follow."""
    planner, loss = BatchPlanner(microbatch_shape(256)), LossSpec(kind="ppo_critic")
    own = planner.plan(SMALL, columns=columns_of(np.float32, 0.1))

    def trained(neighbour):
        learner = learner_with()
        for run_id in ("first", "mine"):
            learner.load_run(critic(run_id), nonzero_state(1, critic(run_id)))
        if neighbour is not None:
            learner.forward_backward("first", neighbour, loss)
        future = learner.forward_backward("mine", own, loss)
        drain(learner)
        assert learner.num_microbatches == 1
        return future.result(0)

    alone, beside = trained(None), trained(planner.plan(SMALL, columns=columns_of(dtype, 0.1)))
    assert same_bytes(alone.cotangents.value_M, beside.cotangents.value_M)
    assert alone.metrics == beside.metrics


def test_every_optional_input_of_a_loss_has_its_dtype_in_the_table():
    given_by_entries = {"behavior_logprobs_M", "advantage_M", "weight_M", "sequence_M", "slot_M"}
    assert set(COLUMNS) == set(LossInputs._fields) - given_by_entries
    values = {np.float32: 0.5, np.int32: -3, np.bool_: True}
    planned = BatchPlanner(microbatch_shape(1024)).plan(TREE, columns={name: [values[dtype]] * NUM for name, dtype in COLUMNS.items()})
    assert {name: column.dtype.type for name, column in planned.columns.items()} == dict(COLUMNS)


SCALARS = (st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.text(max_size=1), st.none(), st.lists(st.integers(), max_size=2))


@given(st.one_of(*(st.lists(each, max_size=4) for each in (*SCALARS, st.one_of(*SCALARS)))), st.sampled_from([np.float32, np.int32, np.bool_]))
def test_an_exact_array_holds_the_numbers_it_was_made_of_or_is_refused(numbers, dtype):
    try:
        made = exact("it", numbers, dtype)
    except InvalidRequestError:
        return
    assert (made.dtype, made.shape) == (dtype, (len(numbers),))
    for number, kept in zip(numbers, made.tolist(), strict=True):
        if dtype is np.float32:
            assert kept == pytest.approx(float(number), rel=1e-6, abs=1e-37, nan_ok=True)
        else:
            assert kept == number


# ---- pairs ----------------------------------------------------------------------------------------------------------------------------

PREFERENCES = dataclasses.replace(
    TREE, entries=dataclasses.replace(TREE.entries, advantage_M=np.where(SEQUENCE_M == PAIR_M, 1, -1).astype(np.float32))
)


@pytest.mark.parametrize("max_positions", [256, 128], ids=["whole", "split"])
def test_what_pairs_are_called_changes_nothing(max_positions):
    planner, loss = BatchPlanner(microbatch_shape(max_positions)), LossSpec(kind="dpo", beta=0.5)
    names = np.random.default_rng(1).choice(2**31 - 1, PAIR_M.max() + 1, replace=False).astype(np.int32) - np.int32(2**30)
    results = []
    for pair_M in (PAIR_M, PAIR_M + 100_000, names[PAIR_M], PAIR_M - NUM):
        learner = learner_with("mine", max_positions=max_positions)
        batch = planner.plan(PREFERENCES, columns={"pair_M": pair_M})
        assert is_whole(batch, loss) == (max_positions == 256)
        future = learner.forward_backward("mine", batch, loss)
        drain(learner)
        gradient = learner.pending_gradient("mine")
        drain(learner)
        results.append((future.result(0), gradient.result(0)))
    (want, want_gradient), *others = results
    assert want.metrics["num_pairs"] == PAIR_M.max() + 1
    for got, gradient in others:
        assert got.metrics == pytest.approx(want.metrics, rel=1e-5)
        np.testing.assert_allclose(got.cotangents.learner_logprobs_M, want.cotangents.learner_logprobs_M, rtol=1e-4, atol=1e-7)
        norm = np.linalg.norm(flat(want_gradient))
        assert np.linalg.norm(flat(gradient) - flat(want_gradient)) <= 1e-5 * norm > 0


# ---- sizes ----------------------------------------------------------------------------------------------------------------------------


def refused(batch, *, max_positions=128, path_positions=0, error=TreeTooLargeError):
    learner = learner_with("mine", max_positions=max_positions, path_positions=path_positions)
    future = learner.forward_backward("mine", batch, LossSpec(kind="ppo"))
    drain(learner)
    with pytest.raises(error) as refusal:
        future.result(0)
    gradient = learner.pending_gradient("mine")
    drain(learner)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient.result(0)))
    return str(refusal.value)


def test_a_batch_planned_for_a_larger_learner_is_refused_with_both_sizes():
    assert "microbatch of 128 positions" in refused(BatchPlanner(microbatch_shape(1024)).plan(TREE))


@pytest.mark.parametrize("path_positions", [0, 256])
def test_a_walk_planned_for_a_longer_path_is_refused_with_both_sizes(path_positions):
    planned = BatchPlanner(microbatch_shape(128), 2048).plan(LONG)
    assert planned.walk.num_blocks * 64 > 256
    message = refused(planned, path_positions=path_positions)
    longest = int(LONG.depth_T.max()) + 1
    assert f"path of {longest} positions in {planned.walk.num_blocks} tiles, this learner walks {path_positions}" in message


def test_a_walk_whose_own_account_of_its_path_is_too_small_is_measured_and_refused():
    walk = plan_replay(LONG, 128)
    message = refused(of_walk(LONG, dataclasses.replace(walk, num_blocks=1)), path_positions=256)
    assert "this learner walks 256" in message


def test_chunks_for_a_larger_microbatch_are_refused():
    refused(of_walk(LONG, plan_replay(LONG, 256)), path_positions=2048)


SIZES = Sizes(microbatch_shape(128), 0, VOCAB, has_values=False)


def test_a_loss_that_must_see_more_at_once_than_any_program_holds_is_refused():
    most = whole_sizes([SIZES.shape])[-1]
    pieces = pieces_of(random_groups(1, num_groups=2), 128)
    batch = batch_of(pieces * (most // sum(len(piece.entries) for piece in pieces) + 1), BatchPlanner(SIZES.shape), SIZES)
    assert len(batch.entries) > most
    with pytest.raises(TreeTooLargeError, match=rf"at most {most}: raise learner\.max_positions"):
        check(Forward(batch, LossSpec(kind="ppo", m2_cap=0.5)), "mine", SIZES)
    check(Forward(batch, LossSpec(kind="ppo")), "mine", SIZES)


def test_losses_over_whole_batches_of_any_number_of_entries_share_the_programs_of_the_closed_set():
    sizes = whole_sizes([SIZES.shape])

    def evaluate(count):
        zeros, floats = np.zeros(count, np.int32), np.zeros(count, np.float32)
        entries = Entries(zeros, zeros, floats + 1, floats, floats, floats, zeros, np.arange(count, dtype=np.int32))
        piece = Piece(zeros[:1], zeros[:1], zeros[:1] + 1, entries)
        job = Job(Forward(BatchPlanner(microbatch_shape(64 * -(-count // 64) + 64)).plan([piece]), LossSpec(kind="ppo", m2_cap=1.0)), num_steps=0)
        job.evaluate(sizes, 4)

    for size in sizes:
        evaluate(size)
    num_programs = loss_cotangents._cache_size()
    for count in (1, sizes[0] + 1, 4 * sizes[0] + 1, 16 * sizes[0] + 1, sizes[-1] - 1):
        evaluate(count)
    assert loss_cotangents._cache_size() == num_programs


# ---- numbers --------------------------------------------------------------------------------------------------------------------------

PIECES = pieces_of(random_groups(3, num_groups=2), 256)
FIRST = PIECES[0]


def with_piece(**changes):
    return (dataclasses.replace(FIRST, **changes), *PIECES[1:])


def with_entries(**changes):
    return with_piece(entries=dataclasses.replace(FIRST.entries, **changes))


def filled(name, value, dtype=None):
    column = getattr(FIRST.entries, name)
    return with_entries(**{name: np.full(len(column), value, dtype or column.dtype)})


ENTRIES, POSITIONS = FIRST.entries, len(FIRST.ids_T)
BATCHES = {
    "a target outside": (filled("target_M", 10**6), r"target_M .* 1000000"),
    "a negative target": (filled("target_M", -1), r"target_M .* -1"),
    "targets beyond int32": (filled("target_M", 2**40, np.int64), r"target_M .* 1099511627776"),
    "targets between ids": (filled("target_M", 2.5, np.float64), r"target_M .* 2\.5 "),
    "targets of text": (filled("target_M", "x", np.dtype("<U1")), "target_M must be numbers"),
    "an id outside": (with_piece(ids_T=FIRST.ids_T + VOCAB), r"ids_T must be in"),
    "a negative id": (with_piece(ids_T=FIRST.ids_T - VOCAB), r"ids_T must be in"),
    "a negative depth": (with_piece(depth_T=FIRST.depth_T - 1), r"depth_T must be in"),
    "an end before its position": (with_piece(end_T=FIRST.end_T * 0), r"end_T"),
    "an end beyond the piece": (with_piece(end_T=FIRST.end_T + POSITIONS), r"end_T"),
    "no positions": ((Piece(*[np.zeros(0, np.int32)] * 3, ENTRIES), *PIECES[1:]), "no positions"),
    "predicted from beyond the piece": (filled("predict_from_M", POSITIONS), f"predict_from_M of an entry is {POSITIONS}"),
    "predicted from before the piece": (filled("predict_from_M", -1), "predict_from_M of an entry is -1"),
    "temperature 0": (filled("temperature_M", 0), "temperature_M must be finite and above 0, got 0"),
    "a negative temperature": (filled("temperature_M", -1), "temperature_M must be finite and above 0, got -1"),
    "no temperature": (filled("temperature_M", np.nan), "temperature_M must be finite and above 0, got nan"),
    "endless temperature": (filled("temperature_M", np.inf), "temperature_M must be finite and above 0, got inf"),
    "an advantage beyond float32": (filled("advantage_M", 1e300, np.float64), r"advantage_M must be float32"),
    "log-probabilities of text": (filled("behavior_logprobs_M", "x", np.dtype("<U1")), "behavior_logprobs_M must be numbers"),
    "log-probabilities in a table": (with_entries(behavior_logprobs_M=ENTRIES.behavior_logprobs_M[:, None]), "one dimension"),
    "one weight too few": (with_entries(weight_M=ENTRIES.weight_M[1:]), "weight_M has"),
    "sequences in bits": (with_entries(sequence_M=np.arange(len(ENTRIES), dtype=np.int32) % 2), "stand together"),
    "no pieces": ((), "without a single trained token"),
    "no entries": ([Piece(FIRST.ids_T, FIRST.depth_T, FIRST.end_T, Entries(*[np.zeros(0, np.int32)] * 8))], "without a single trained token"),
    "something else": ({}, "got dict"),
    "nothing": (None, "got NoneType"),
    "text": ("pieces", "got str"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_numbers_out_of_range_are_refused_by_name_and_value(name):
    batch, said = BATCHES[name]
    with pytest.raises(InvalidRequestError, match=said):
        batch_of(batch, BatchPlanner(microbatch_shape(256)), dataclasses.replace(SIZES, shape=microbatch_shape(256)))


def test_a_planned_batch_that_was_changed_since_is_refused():
    sizes = dataclasses.replace(SIZES, shape=microbatch_shape(256))
    planned = BatchPlanner(sizes.shape).plan(PIECES)
    changed = {
        "is not what its parts have": {"entries": dataclasses.replace(planned.entries, advantage_M=planned.entries.advantage_M + 1)},
        "does not have each of them": {"places": (planned.places[0] * 0, *planned.places[1:])},
        "places": {"places": ()},
        "column returns_M": {"columns": {"returns_M": np.zeros(len(planned.entries), np.float64)}},
        "column rewards_M": {"columns": {"rewards_M": np.zeros(len(planned.entries), np.float32)}},
        "target_M must be": {"entries": dataclasses.replace(planned.entries, target_M=planned.entries.target_M.astype(np.int64))},
        "int32": {"parts": with_piece(ids_T=FIRST.ids_T.tolist())},
        "Pieces": {"parts": (None,)},
    }
    assert batch_of(planned, BatchPlanner(sizes.shape), sizes) is planned
    for said, change in changed.items():
        with pytest.raises(InvalidRequestError, match=said):
            batch_of(dataclasses.replace(planned, **change), BatchPlanner(sizes.shape), sizes)


def test_trees_that_are_none_are_refused():
    planner = BatchPlanner(microbatch_shape(256))
    parents, last = TREE.node_parent_N, len(TREE.node_parent_N) - 1
    for said, change in {
        "predict_from_M": {"entries": dataclasses.replace(TREE.entries, predict_from_M=TREE.entries.predict_from_M + len(TREE))},
        "sequence_M": {"entries": dataclasses.replace(TREE.entries, sequence_M=TREE.entries.sequence_M[::-1])},
        "depth_T": {"depth_T": TREE.depth_T + 1},
        "end_T is": {"end_T": np.minimum(TREE.end_T + 1, len(TREE))},
        "follow": {"node_start_N": TREE.node_start_N + 1},
        "parent": {"node_parent_N": np.append(parents[:-1], last).astype(np.int32)},
        "length|numbers": {"node_stop_N": TREE.node_stop_N[:-1]},
        "EntryOutputs|Entries": {"entries": None},
    }.items():
        with pytest.raises(InvalidRequestError, match=said):
            planner.plan(dataclasses.replace(TREE, **change))


@pytest.mark.parametrize("name", ["behavior_logprobs_M", "advantage_M", "weight_M"])
def test_a_nan_that_trains_surfaces_as_a_refused_step_of_its_own_run(name):
    learner = learner_with("mine", "other")
    nan = learner.train("mine", filled(name, np.nan))
    fine = learner.train("other", PIECES)
    drain(learner)
    with pytest.raises(GradientNotFiniteError):
        nan.result(0)
    assert fine.result(0).grad_norm > 0


COTANGENTS = {
    "in a table": ([np.zeros((NUM, 2), np.float32)] * 3, "one dimension"),
    "of text": ([np.array(["x"] * NUM)] * 3, "must be numbers"),
    "that are not finite": ([np.full(NUM, np.nan)] * 3, "is nan: cotangents must be finite"),
    "too large": ([np.full(NUM, 1e300)] * 3, "must be float32"),
    "that are nothing": ([None] * 3, "must be numbers"),
    "of values without room": ([np.zeros(NUM), np.zeros(NUM), np.ones(NUM)], "has_values"),
}


@pytest.mark.parametrize("name", COTANGENTS)
def test_cotangents_are_refused_by_name_and_value(name):
    parts, said = COTANGENTS[name]
    with pytest.raises(InvalidRequestError, match=said):
        cotangents_of(EntryOutputs(*parts), PLANNED[0], SIZES)


# ---- anything -------------------------------------------------------------------------------------------------------------------------

ANYTHING = [
    *(None, "text", b"bytes", "", 0, -1, 2**40, 10**400, 2.5, float("nan"), float("inf"), 1j, True, [], [None], ["a"], [[1], [1, 2]], (), {}, {1: 2}),
    *(object(), len, np.array("x"), np.zeros((2, 2)), np.zeros(3), np.full(3, np.nan), np.array([2**40]), np.array([None]), np.zeros(0, np.int32)),
]
DISTORTIONS = [
    lambda x: x.astype(np.float64),
    lambda x: x.astype(np.int64) + 2**40,
    lambda x: x.astype(np.uint8),
    lambda x: x.reshape(-1, 1),
    lambda x: x[:-1],
    lambda x: x[::-1],
    lambda x: x.tolist(),
    lambda x: x.astype(str),
    lambda x: x.astype(object),
    lambda x: x * 0 - 1,
    lambda x: x * 0 + 10**6,
    lambda x: np.full(x.shape, np.nan, np.float32),
    lambda x: np.full(x.shape, np.inf, np.float32),
    lambda x: np.full(x.shape, 1e300),
    lambda x: np.full(x.shape, 3e38, np.float32),
    lambda x: x + np.ones(1, x.dtype),
]
STATE = nonzero_state(1, spec("new"))
PLANNED = [BatchPlanner(microbatch_shape(n), 1024).plan(TREE) for n in (256, 1024)]
WALKED = BatchPlanner(microbatch_shape(256), 1024).plan(TREE, prefix_gradient="stop")
FINE = EntryOutputs(*np.zeros((3, NUM), np.float32))


def spoiled(random, value):
    """`value`, or something else, or with some part of it spoiled."""
    way = random.choice(["keep", "replace", "inside", "inside"])
    if way == "keep":
        return value
    if way == "inside":
        if dataclasses.is_dataclass(value):
            name = random.choice([f.name for f in dataclasses.fields(value)])
            return dataclasses.replace(value, **{name: spoiled(random, getattr(value, name))})
        if isinstance(value, np.ndarray):
            return random.choice(DISTORTIONS)(value)
        if hasattr(value, "_fields"):
            name = random.choice(value._fields)
            return value._replace(**{name: spoiled(random, getattr(value, name))})
        if isinstance(value, tuple | list) and value:
            index = random.randrange(len(value))
            return type(value)([*value[:index], spoiled(random, value[index]), *value[index + 1 :]])
        if isinstance(value, dict) and value:
            name = random.choice(sorted(value))
            return {**value, name: spoiled(random, value[name])}
    return random.choice(ANYTHING)


def calls_by(random):
    """(method, its arguments), of each that submits."""

    def some(*values):
        return [spoiled(random, value) if random.random() < (0.1 if isinstance(value, str) else 0.5) else value for value in values]

    batch, loss, optimizer = random.choice([TREE, PIECES, *PLANNED, WALKED]), LossSpec(kind="ppo"), OptimizerSpec(1e-2)
    return [
        ("load_run", some(spec("new"), STATE), {}),
        ("unload_run", some("nobody"), {}),
        ("forward", some("mine", batch, loss), {"of_base": spoiled(random, False)}),
        ("forward_backward", some("mine", batch, loss), {"cotangents": random.choice([None, spoiled(random, FINE)])}),
        ("optim_step", some("mine", optimizer), {}),
        ("load", some("mine", START), {}),
        ("save", some("mine"), {}),
        ("train", some("mine", batch), {"loss": spoiled(random, loss), "optimizer": spoiled(random, optimizer)}),
        ("score_ids", some("mine", (5, 6, 7)), {}),
        ("skip", some("mine", 0), {}),
        (random.choice(["save", "optim_step"]), ["mine"], {"seq": spoiled(random, 0)}),
        ("pending_gradient", some("mine"), {}),
    ]


def beside(calls):
    """(futures of the calls, a digest of what a neighbour's steps beside and after them come to)."""
    learner = learner_with("mine", "other", path_positions=1024)
    drain(learner)
    futures = [getattr(learner, name)(*args, **named) for name, args, named in calls]
    other = learner.train("other", PIECES)
    drain(learner)
    after = learner.train("other", PIECES)
    drain(learner)
    learner.unload_run("mine")  # an operation with a number waits for all before it
    drain(learner)
    states = jax.tree.leaves((other.result(0).state, after.result(0).state))
    return futures, sha256(b"".join(np.asarray(leaf).tobytes() for leaf in states)).hexdigest()


@pytest.fixture(scope="module")
def undisturbed():
    return beside([])[1]


def check_anything(undisturbed, seed):
    random = Random(seed)
    calls = random.sample(calls_by(random), 4)
    futures, found = beside(calls)
    for (name, *_), future in zip(calls, futures, strict=True):
        assert future.done(), name
        error = future.exception(0)
        assert error is None or isinstance(error, NoriaError), (name, error)
    assert found == undisturbed


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_anything_handed_in_is_done_or_refused_by_name_and_neighbours_keep_their_bits(undisturbed, seed):
    check_anything(undisturbed, seed)


@pytest.mark.prove
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_much_of_anything_handed_in_is_done_or_refused_by_name_and_neighbours_keep_their_bits(undisturbed, seed):
    check_anything(undisturbed, seed)
