"""Gradients of the learner against naive ones, end to end: both executors, every loss, random trees.

Each leaf of the gradient agrees to 1e-5 by its norm, in float32, with what `naive_learner` makes of the same episodes, row by row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import ALGORITHM, branching_groups, drain, make_learner, nonzero_state, spec
from naive_learner import Batch, gradient_of, naive_loss, outputs_of, pulled, rows_of

from noria.learner.operations import EntryOutputs
from noria.model.lora import HEAD, VALUE
from noria.rl.losses import LOSSES, TokenOutputs
from noria.rl.tree import build_tree
from noria.types import LoraSpec, LossSpec

RUN = dataclasses.replace(spec("run"), lora=LoraSpec(4, 8.0, train_unembed=True, train_value=True))
SCALE = RUN.lora.scale
EXECUTORS = {
    "packed": {"max_positions": 1024},
    "packed in pieces": {"max_positions": 256},
    "walked": {"max_positions": 128, "path_positions": 1024},
}
MASKS = {"tis_cap": 1.1, "sequence_mask_c": 1.3, "icepop_low": 0.6, "icepop_high": 1.6, "m2_cap": 0.06, "dppo_low": 0.001, "dppo_high": 0.001}
KL = {"kl_coeff": 0.3, "entropy_coeff": 0.2}

SPECS = {
    "grpo": LossSpec(),
    "grpo without corrections": LossSpec(tis_cap=0.0, sequence_mask_c=0.0),
    "grpo, all masks": LossSpec(**MASKS),
    "grpo, k1 and entropy": LossSpec(sequence_mask_c=0.0, kl_estimator="k1", **KL),
    "grpo, k2 and a proximal policy behind": LossSpec(sequence_mask_c=0.0, proximal_lag=1.0, kl_estimator="k2", **KL),
    "ppo": LossSpec(kind="ppo", clip_low=0.1, clip_high=0.3),
    "ppo, all masks": LossSpec(kind="ppo", **MASKS),
    "ppo, k3 and entropy": LossSpec(kind="ppo", kl_estimator="k3", **KL),
    "cispo": LossSpec(kind="cispo", clip_high=0.2),
    "dro": LossSpec(kind="dro", beta=0.5),
    "dro, truncated": LossSpec(kind="dro", tis_cap=1.1),
    "gspo": LossSpec(kind="gspo", clip_low=0.05, clip_high=0.05),
    "importance_sampling": LossSpec(kind="importance_sampling"),
    "importance_sampling, truncated": LossSpec(kind="importance_sampling", tis_cap=1.1),
    "stable_reinforce": LossSpec(kind="stable_reinforce", kl_coeff=0.3),
    "ppo_critic": LossSpec(kind="ppo_critic"),
    "ppo_critic, k3 and entropy, not clipped": LossSpec(kind="ppo_critic", value_clip=0.0, value_coeff=0.8, **KL),
    "dpo": LossSpec(kind="dpo", beta=0.5),
    "cross_entropy": LossSpec(kind="cross_entropy"),
    "linear": LossSpec(kind="linear"),
}
BRINGS_VALUE_GRADIENT = ("ppo_critic",)


@functools.cache
def adapter(*, of_base=False):
    """The run's parameters, in which no trained leaf is zero; or those of a run that is still the base."""
    params = nonzero_state(7, RUN).params
    return params if not of_base else {"a": params["a"], "b": jax.tree.map(np.zeros_like, params["b"])}


@functools.cache
def case(seed):
    """(tree, rows, columns, batch) of random episodes whose ratios lie on all sides of what clips and masks them."""
    groups = branching_groups(seed)
    tree, _ = build_tree(groups, ALGORITHM.model_copy(update={"zero_signal": "train"}))
    rows, rng = rows_of([e for g in groups for e in g.episodes]), np.random.default_rng(seed)
    outputs, count = jax.tree.map(np.asarray, outputs_of(adapter(), SCALE, rows)), len(rows.row_M)
    weight_Q, shift_Q = rng.choice([1.0, 0.5, 2.0], len(rows.ids_QL)) / count, rng.permutation(np.resize([0.0, 0.1, -0.1, 0.4], len(rows.ids_QL)))

    def near(x, spread):
        return (x + rng.normal(0, spread, count)).astype(np.float32)

    entries = dataclasses.replace(
        tree.entries,
        behavior_logprobs_M=near(outputs.learner_logprobs_M + shift_Q[rows.row_M], 0.25),
        advantage_M=near(0.0, 1.0),
        weight_M=weight_Q[rows.row_M].astype(np.float32),
    )
    columns = {
        "returns_M": near(outputs.value_M, 1.0),
        "behavior_values_M": near(outputs.value_M, 0.3),
        "pair_M": rows.row_M // 2,
        "staleness_M": rng.integers(0, 4, count).astype(np.int32),
    }
    reference = np.asarray(outputs_of(adapter(of_base=True), SCALE, rows).learner_logprobs_M)
    mine = (entries.behavior_logprobs_M, entries.advantage_M, entries.weight_M, rows.row_M, reference)
    return dataclasses.replace(tree, entries=entries), rows, columns, Batch(*mine, *columns.values())


def paired(tree, batch):
    """The same with sequences chosen and rejected in turn, and a weight to each pair."""
    side, weight = np.where(batch.sequence % 2, -1, 1).astype(np.float32), (0.5 / (1 + batch.pair % 3)).astype(np.float32)
    entries = dataclasses.replace(tree.entries, advantage_M=side, weight_M=weight)
    return dataclasses.replace(tree, entries=entries), batch._replace(advantage=side, weight=weight)


@functools.cache
def learner_of(executor):
    learner = make_learner(**EXECUTORS[executor], has_unembed=True, has_values=True)
    learner.load_run(RUN, nonzero_state(7, RUN))
    return learner


def learned(executor, tree, columns, loss, **more):
    """(result, gradient) of the learner; what is pending is cleared for the next."""
    learner = learner_of(executor)
    batch = learner.planner.plan(tree, columns=columns)
    assert (batch.walk is not None) == (executor == "walked")
    assert len(batch.parts) == 1 if executor == "packed" else len(batch.parts) > 1
    if batch.walk is not None:
        assert {visit.action for visit in batch.walk.visits} == {"enter", "pull"}
    done = learner.forward_backward("run", batch, loss, **more)
    drain(learner)
    pending = learner.pending_gradient("run")
    drain(learner)
    learner.load("run", nonzero_state(7, RUN))
    return done.result(0), pending.result(0)


def assert_gradient(got, want, *, has_values):
    """Every leaf, by its norm. Of a loss without a critic the value head's is zero, and of no other is any."""
    for side in ("a", "b"):
        assert got[side].keys() == want[side].keys() >= {HEAD, VALUE, "q", "down"}
        for module, leaf in want[side].items():
            norm, error = np.linalg.norm(leaf), np.linalg.norm(got[side][module] - leaf)
            assert (norm > 0) == (module != VALUE or has_values), (side, module)
            assert error <= 1e-5 * norm, (side, module, error / norm)


def compare(executor, name, seed):
    (tree, rows, columns, batch), loss = case(seed), SPECS[name]
    if loss.kind == "dpo":
        tree, batch = paired(tree, batch)
    result, got = learned(executor, tree, columns, loss)
    want_loss, want = gradient_of(adapter(), SCALE, rows, batch, loss)
    assert_gradient(got, want, has_values=loss.kind in BRINGS_VALUE_GRADIENT)
    assert result.metrics["loss"] == pytest.approx(want_loss, rel=2e-5, abs=1e-6)
    return result


SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(2, 8)))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_trees_have_what_makes_gradients_hard(seed):
    tree, rows, _, _ = case(seed)
    entries, index = tree.entries, np.arange(len(tree))
    assert (entries.target_M == rows.target_M).all()
    on_one = np.stack((entries.predict_from_M, entries.target_M))
    assert len(np.unique(on_one, axis=1).T) < 0.9 * len(entries), "several entries on one position"
    node_T = np.searchsorted(tree.node_start_N, index, side="right") - 1
    is_inner_N = np.isin(np.arange(len(tree.node_start_N)), tree.node_parent_N)
    follows_M = np.concatenate([[False], (rows.row_M[1:] == rows.row_M[:-1]) & (rows.at_M[1:] == rows.at_M[:-1] + 1)])
    assert is_inner_N[node_T[entries.predict_from_M[follows_M]]].sum() > 10, "trained tokens in inner nodes"
    assert (np.diff(rows.at_M)[np.diff(rows.row_M) == 0] > 1).sum() > 5, "several turns"
    assert tree.node_parent_N.max() > 0
    (first,) = np.flatnonzero(tree.node_parent_N < 0)
    assert (tree.node_parent_N == first).sum() == 3, "three groups below one header"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_gradient_of_every_loss_equals_the_naive_one(executor, name, seed):
    result = compare(executor, name, seed)
    if "all masks" in name:
        assert 0 < result.metrics["masked_fraction"] < 0.9
        assert 0 < result.metrics["masked_sequence_fraction"] < 0.9
    if result.metrics.get("clipped_fraction") is not None and SPECS[name].kind != "grpo":
        assert 0 < result.metrics["clipped_fraction"] < 1
    if SPECS[name].tis_cap:
        assert 0 < result.metrics["capped_fraction"] < 1


def test_every_kind_of_loss_is_among_them():
    assert {each.kind for each in SPECS.values()} == set(LOSSES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_outputs_and_the_gradient_of_cotangents_that_a_caller_brings_equal_the_naive_ones(executor, seed):
    tree, rows, columns, _ = case(seed)
    d_3M = np.random.default_rng(seed).normal(size=(3, len(rows.row_M))).astype(np.float32)
    result, got = learned(executor, tree, columns, LossSpec(), cotangents=EntryOutputs(*d_3M))
    assert_gradient(got, pulled(adapter(), SCALE, rows, TokenOutputs(*d_3M)), has_values=True)
    for field in dataclasses.fields(EntryOutputs):
        want = getattr(outputs_of(adapter(), SCALE, rows), field.name)
        np.testing.assert_allclose(getattr(result.outputs, field.name), want, rtol=1e-5, atol=1e-5)


def test_the_chain_rule_in_two_programs_is_autodiff_of_the_whole():
    """Of the naive reference itself: its gradient is that of the loss as one function of the adapter."""
    _, rows, _, batch = case(1)
    whole = jax.grad(lambda each: naive_loss(outputs_of(each, SCALE, rows), batch, SPECS["ppo_critic"]))(jax.tree.map(jnp.asarray, adapter()))
    _, parts = gradient_of(adapter(), SCALE, rows, batch, SPECS["ppo_critic"])
    assert_gradient(parts, whole, has_values=True)
