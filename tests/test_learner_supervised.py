"""Supervised steps on the tiny base: packed gradients equal naive ones example by example, and the loss falls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import drain, make_learner, nonzero_state, spec, tiny
from test_learner_gradients import LENGTH, SLOT, naive_logprobs

from noria.learner.optimizer import empty_state, load_slot
from noria.learner.step import Model, loss_cotangents, loss_inputs, pull, score, to_device
from noria.rl.losses import loss_table
from noria.rl.packing import ReadyRun, cut, pack, plan_microbatch, shapes_up_to
from noria.rl.supervised import batch_indices, example_tree
from noria.types import Example, LossSpec, OptimizerSpec

CROSS_ENTROPY = LossSpec(kind="cross_entropy")


def random_examples(seed, count=8):
    """Chat-like: a head shared by all, a few shared questions, answers over few ids, an untrained stretch inside, weights of both signs."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 250, 12)
    questions = [rng.integers(0, 250, rng.integers(3, 20)) for _ in range(3)]
    examples = []
    for _ in range(count):
        answer, between, again = (rng.integers(0, high, rng.integers(1, 8)) for high in (3, 250, 3))
        ids = np.concatenate([head, questions[rng.integers(3)], answer, between, again]).astype(np.int32)
        is_trained = np.zeros(len(ids), np.bool_)
        stop = len(ids) - len(again) - len(between)
        is_trained[stop - len(answer) : stop] = is_trained[len(ids) - len(again) :] = True
        examples.append(Example(ids, is_trained, float(rng.choice([1.0, 0.5, -1.0]))))
    return examples


def naive_gradient(examples, adapter, scale, denominator):
    ids, weight = np.zeros((len(examples), LENGTH), np.int32), np.zeros((len(examples), LENGTH), np.float32)
    num_tokens = sum(int(e.is_trained_T.sum()) for e in examples)
    for row, e in enumerate(examples):
        ids[row, : len(e.ids_T)] = e.ids_T
        share = num_tokens if denominator == "tokens" else len(examples) * int(e.is_trained_T.sum())
        weight[row, : len(e.ids_T)] = e.is_trained_T * e.weight / share

    @jax.jit
    def loss(adapter):
        return -(weight[:, 1:] * naive_logprobs(adapter, scale, jnp.asarray(ids), jnp.ones(ids.shape))).sum()

    return jax.grad(loss)(adapter)


def packed_gradient(examples, state, scale, denominator, max_positions):
    config, base = tiny()
    slots, scale_A = load_slot(empty_state(config, 3, 8), SLOT, state), jnp.zeros(3).at[SLOT].set(scale)
    pieces = cut(example_tree(examples, denominator), shapes_up_to(max_positions)[-1])
    gradient, done = slots.gradient, 0
    while done < len(pieces):
        plan = plan_microbatch([ReadyRun("run", SLOT, pieces, done)], shapes_up_to(max_positions), max_positions)
        done += len(plan.pieces)
        microbatch = pack(plan)
        arrays = to_device(microbatch)
        outputs, residuals = score(Model(base.stacked, slots.params, scale_A), arrays, config)
        cotangent_M, _ = loss_cotangents(outputs, loss_inputs(microbatch), loss_table({SLOT: CROSS_ENTROPY}, 3))
        gradient = pull(Model(base.stacked, slots.params, scale_A), arrays, residuals, cotangent_M, gradient, config=config)
    return jax.tree.map(lambda leaf: leaf[:, SLOT], gradient), len(pieces)


@pytest.mark.parametrize(("denominator", "max_positions"), [("tokens", 256), ("episodes", 128)])
def test_packed_supervised_gradients_equal_naive_per_example_gradients(denominator, max_positions):
    examples, state, scale = random_examples(1, 16 if max_positions == 128 else 6), nonzero_state(1, spec("run")), spec("run").lora.scale
    got, num_pieces = packed_gradient(examples, state, scale, denominator, max_positions)
    want = naive_gradient(examples, jax.tree.map(jnp.asarray, state.params), scale, denominator)
    assert (num_pieces > 1) == (max_positions == 128)
    for got_leaf, want_leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(want_leaf) > 0
        assert np.linalg.norm(got_leaf - want_leaf) <= 1e-5 * np.linalg.norm(want_leaf)


def test_the_supervised_loss_falls_on_the_tiny_base():
    rng = np.random.default_rng(0)
    answers = [tuple(rng.integers(0, 250, 6).tolist()) for _ in range(6)]
    examples = [Example(np.array([200 + n, *answer], np.int32), np.array([0] + [1] * 6, np.bool_)) for n, answer in enumerate(answers)]
    learner, run_spec = make_learner(), spec("run", weight_decay=0.0)
    learner.load_run(run_spec, nonzero_state(7, run_spec))
    losses = []
    for step in range(40):
        chosen = [examples[i] for i in batch_indices(step, num_examples=6, batch_size=4, seed=3)]
        pieces = cut(example_tree(chosen, "tokens"), shapes_up_to(256)[-1])
        future = learner.train("run", pieces, loss=CROSS_ENTROPY, optimizer=OptimizerSpec(2e-2, warmup_steps=4))
        drain(learner)
        losses.append(future.result(0).metrics["nll_mean"])
        assert future.result(0).metrics["loss"] == pytest.approx(losses[-1], rel=1e-5)
    assert losses[0] > 4.0
    assert np.mean(losses[-5:]) < 0.2 * losses[0]
