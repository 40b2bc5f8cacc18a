"""The learning rate of every step, against plain Python; loss and optimizer of a single batch; a new mixture compiles nothing."""

import dataclasses
import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import monitoring
from learner_builders import drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec

from noria.learner.optimizer import hyperparameters, rate_at
from noria.types import LossSpec, OptimizerSpec

jitted = jax.jit(rate_at)
CROSS_ENTROPY = LossSpec(kind="cross_entropy")


def naive_rate(number: int, o: OptimizerSpec) -> float:
    """The rate of a slot's step `number`, 1-based, in float64."""
    n = max(number - o.first_step, 1)
    rise = min(n / o.warmup_steps, 1.0) if o.warmup_steps else 1.0
    if o.schedule == "constant" or n <= o.warmup_steps:
        return o.learning_rate * rise
    if n >= o.decay_steps:
        return o.learning_rate * o.final_fraction
    progress = (n - o.warmup_steps) / (o.decay_steps - o.warmup_steps)
    left = 1 - progress if o.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return o.learning_rate * (o.final_fraction + (1 - o.final_fraction) * left)


SPECS = st.builds(
    OptimizerSpec,
    st.sampled_from([1e-6, 5e-4, 1.0]),
    warmup_steps=st.integers(0, 12),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    decay_steps=st.integers(0, 40),
    final_fraction=st.sampled_from([0.0, 0.1, 1.0]),
    first_step=st.integers(0, 20),
)


@settings(max_examples=60, deadline=None)
@given(SPECS)
def test_the_rate_of_every_step_is_the_written_one(optimizer):
    hyper = hyperparameters(optimizer)
    got = [float(jitted(jnp.int32(number - 1), hyper)) for number in range(1, 64)]
    expected = [naive_rate(number, optimizer) for number in range(1, 64)]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * optimizer.learning_rate)


def test_a_decay_begins_at_the_full_rate_and_ends_where_it_says():
    for schedule in ("linear", "cosine"):
        hyper = hyperparameters(OptimizerSpec(2.0, warmup_steps=4, schedule=schedule, decay_steps=20, final_fraction=0.25, first_step=100))
        rates = [float(jitted(jnp.int32(100 + k), hyper)) for k in range(40)]
        assert rates[3] == 2.0
        assert rates[:4] == sorted(rates[:4])
        assert rates[3:20] == sorted(rates[3:20], reverse=True)
        assert rates[19:] == pytest.approx([0.5] * 21, rel=1e-6)


def loaded(*run_ids):
    learner = make_learner()
    for number, run_id in enumerate(run_ids):
        learner.load_run(spec(run_id), nonzero_state(number, spec(run_id)))
    return learner


def result(learner, future):
    drain(learner)
    return future.result(0)


def test_a_step_reports_the_rate_it_used():
    optimizer = OptimizerSpec(1e-3, warmup_steps=2, schedule="linear", decay_steps=5)
    learner, pieces = loaded("run"), pieces_of(random_groups(1, num_groups=1))
    used = [result(learner, learner.train("run", pieces, optimizer=optimizer)).learning_rate for _ in range(6)]
    assert used == pytest.approx([naive_rate(number, optimizer) for number in range(1, 7)], rel=1e-6, abs=1e-9)


def test_a_batch_that_brings_its_loss_and_optimizer_trains_as_a_run_that_has_them():
    own = dataclasses.replace(spec("run"), loss=CROSS_ENTROPY, optimizer=OptimizerSpec(3e-3, beta1=0.5, grad_clip_norm=0.1))
    pieces = [pieces_of(random_groups(seed)) for seed in range(3)]
    brought, owned = make_learner(), make_learner()
    brought.load_run(spec("run"), nonzero_state(7, spec("run")))
    owned.load_run(own, nonzero_state(7, own))
    for batch in pieces[:2]:
        first = result(brought, brought.train("run", batch, loss=own.loss, optimizer=own.optimizer))
        second = result(owned, owned.train("run", batch))
        assert same_bytes(first.state, second.state)
        assert first.metrics == second.metrics
        assert "ratio_mean" not in first.metrics
    back = result(brought, brought.train("run", pieces[2]))
    assert "ratio_mean" in back.metrics, "the run's own loss holds for batches that bring none"
    assert back.learning_rate == np.float32(spec("run").optimizer.learning_rate)


def test_runs_of_different_losses_share_a_pass_and_each_has_the_bytes_it_has_alone():
    batches = {name: pieces_of(random_groups(seed, num_groups=2)) for seed, name in enumerate(("rl", "sft"))}
    losses = {"rl": None, "sft": CROSS_ENTROPY}

    def train(*names):
        learner = make_learner(512)
        for name in names:
            learner.load_run(spec(name), nonzero_state(len(name), spec(name)))
        for _ in range(3):
            futures = {name: learner.train(name, batches[name], loss=losses[name]) for name in names}
            drain(learner)
        return {name: future.result(0).state for name, future in futures.items()}, learner.num_microbatches

    together, num_passes = train("rl", "sft")
    assert num_passes == 3, "they must share"
    for name, state in together.items():
        assert same_bytes(state, train(name)[0][name])


def test_no_mixture_of_losses_and_optimizers_compiles_anything():
    learner = loaded("a", "b")
    pieces = pieces_of(random_groups(1, num_groups=1))
    for run_id in ("a", "b"):
        learner.train(run_id, pieces)
    drain(learner)
    compiled = []

    def listen(event, seconds, **named):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(named.get("fun_name", "?"))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        for kind, schedule in product(("grpo", "cross_entropy"), ("constant", "linear", "cosine")):
            optimizer = OptimizerSpec(1e-3, 0.8, 0.9, 1e-7, 0.2, 0.5, 3, schedule, 9, 0.3, 1)
            learner.train("a", pieces, loss=LossSpec(0.1, 0.2, 1.5, 1.1, kind), optimizer=optimizer)
            learner.train("b", pieces)
            drain(learner)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
