"""A bfloat16 base: adapters and moments stay float32, log-probabilities are within the dtype's tolerance of float32's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import drain, nonzero_state, pieces_of, random_groups, spec, tiny

from noria.clock import RealClock
from noria.config import LearnerConfig
from noria.learner.learner import Learner
from noria.model.placement import place
from noria.model.weights import load_base
from noria.observe import SpanRecorder


def step_on(base):
    config, clock = tiny()[0], RealClock()
    settings = LearnerConfig(max_positions=256, num_slots=1, rank_classes=(8,))
    learner = Learner(base.stacked, config, settings, spans=SpanRecorder(clock), clock=clock, wake=lambda: None, max_stall_s=60.0)
    learner.load_run(spec("run"), nonzero_state(1, spec("run")))
    scored = learner.score_ids("run", tuple(range(40)))
    trained = learner.train("run", pieces_of(random_groups(1)))
    drain(learner)
    return scored.result(0), trained.result(0)


@pytest.mark.slow
def test_a_bfloat16_base_trains_a_float32_adapter_close_to_a_float32_base():
    exact, rounded = step_on(tiny()[1]), step_on(place(load_base("tiny").params, jnp.bfloat16))
    assert 0 < np.abs(exact[0] - rounded[0]).mean() < 5e-2
    assert abs(rounded[1].grad_norm / exact[1].grad_norm - 1) < 0.05
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(rounded[1].state[:3]))
