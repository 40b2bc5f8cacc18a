"""KL against the reference: each form has the gradient of KL(learner || reference), and the estimators estimate it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import run
from losses_reference import Sequence_, Token

from noria.rl.kl import KL_ESTIMATORS, kl_estimate, kl_rewards, rewards_with_kl
from noria.types import LossSpec

RNG = np.random.default_rng(7)
LOGITS, REFERENCE_LOGITS = RNG.normal(0, 1, 5), RNG.normal(0, 1, 5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


LOG_P, LOG_REF = log_softmax(LOGITS), log_softmax(REFERENCE_LOGITS)
P = np.exp(LOG_P)
KL = float((P * (LOG_P - LOG_REF)).sum())
SCORE = np.eye(5) - P
"""[token, logit]: the gradient of each token's log-probability."""
KL_GRADIENT = P * (LOG_P - LOG_REF - KL)
"""Of KL(learner || reference) with respect to the logits, in closed form."""


def test_the_closed_form_is_the_gradient_of_the_kl():
    def kl(logits: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(logits)
        return (jnp.exp(log_p) * (log_p - LOG_REF)).sum()

    np.testing.assert_allclose(jax.grad(kl)(jnp.asarray(LOGITS, jnp.float32)), KL_GRADIENT, rtol=1e-4, atol=1e-6)


def slopes(spec: LossSpec) -> np.ndarray:
    """The cotangent of each of the five tokens, without any reward."""
    tokens = [Token(float(a), float(a), 0.0, ref=float(b)) for a, b in zip(LOG_P, LOG_REF, strict=True)]
    got, _ = run([Sequence_(0, tokens)], {0: spec})
    return got.d_learner_logprobs_M.astype(np.float64)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "importance_sampling", "cispo", "dro", "gspo", "ppo_critic"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_penaltys_expected_gradient_is_the_analytic_one(kind, estimator):
    spec = LossSpec(kind=kind, kl_coeff=0.5, kl_estimator=estimator)
    np.testing.assert_allclose((P * slopes(spec)) @ SCORE, 0.5 * KL_GRADIENT, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_mean_over_samples_is_within_three_standard_errors(estimator):
    samples = np.random.default_rng(0).choice(5, 20_000, p=P)
    each = slopes(LossSpec(kl_coeff=1.0, kl_estimator=estimator))[samples, None] * SCORE[samples]
    standard_error = each.std(axis=0, ddof=1) / np.sqrt(len(samples))
    assert (np.abs(each.mean(axis=0) - KL_GRADIENT) < 3 * standard_error).all()


def test_differentiating_the_estimators_would_not_give_it():
    """Why the slope is the log-ratio for all of them: autodiff of k1 has mean zero, that of k3 is the gradient of the other KL."""
    x = LOG_P - LOG_REF
    assert np.abs((P * np.ones(5)) @ SCORE).max() < 1e-12
    of_k3 = (P * (1 - np.exp(-x))) @ SCORE
    np.testing.assert_allclose(of_k3, P - np.exp(LOG_REF), atol=1e-12)  # of KL(reference || learner)
    assert np.abs(of_k3 - KL_GRADIENT).max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_kl_as_their_mean(estimator):
    each = kl_estimate(jnp.asarray(LOG_P - LOG_REF, jnp.float32), jnp.full(5, KL_ESTIMATORS[estimator]))
    assert float((P * np.asarray(each)).sum()) == pytest.approx(KL, rel=1e-5)


@given(st.floats(-20, 20, width=32))
def test_k2_and_k3_are_never_negative(x):
    for estimator in ("k2", "k3"):
        assert float(kl_estimate(jnp.float32(x), jnp.int32(KL_ESTIMATORS[estimator]))) >= 0


def test_the_penalty_in_the_reward_has_the_analytic_gradient():
    """REINFORCE on reward - coeff * KL, without a baseline: the policy gradient of the penalty alone is -coeff * grad KL."""
    penalties = [kl_rewards([a], [b], 0.5) for a, b in zip(LOG_P, LOG_REF, strict=True)]
    rewards = rewards_with_kl(np.zeros(5), penalties)
    tokens = [Token(float(a), float(a), float(r)) for a, r in zip(LOG_P, rewards, strict=True)]
    got, _ = run([Sequence_(0, tokens)], {0: LossSpec(kind="importance_sampling")})
    np.testing.assert_allclose((P * got.d_learner_logprobs_M) @ SCORE, 0.5 * KL_GRADIENT, rtol=1e-5, atol=1e-7)


def test_the_penalty_in_the_reward_is_that_of_the_whole_episode():
    penalties = [kl_rewards([-1.0, -2.0], [-1.5, -1.0], 0.1), kl_rewards([], [], 0.1), kl_rewards([-1e4], [0.0], 0.1)]
    np.testing.assert_allclose(rewards_with_kl([1.0, 0.5, 0.0], penalties), [1.05, 0.5, 2.0], rtol=1e-6)
    assert rewards_with_kl([], []).shape == (0,)
    assert np.isnan(kl_rewards([np.nan], [0.0], 0.1)).all()


def test_stable_reinforce_weighs_k2_against_the_behavior_policy():
    got, _ = run([Sequence_(0, [Token(-1.0, -1.5, 0.0, ref=float("nan"))])], {0: LossSpec(kind="stable_reinforce", kl_coeff=0.2)})
    assert got.d_learner_logprobs_M[0] == pytest.approx(0.2 * 0.5)
