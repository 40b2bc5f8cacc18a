"""Every loss of a run file, from sampled episodes to committed versions, on one server: side by side, and each step taken again bit for bit."""

import asyncio
import math

import numpy as np
import pytest
from service_builders import Constant, Letters, run_config, serving, stored

from noria.config import AlgorithmConfig
from noria.service import store
from noria.service.recorded_step import retake

LOSSES = AlgorithmConfig.model_fields["loss"].annotation.__args__

SETTINGS = {
    "kl-reward": {"loss": "grpo", "kl": "reward", "kl_coeff": 0.1, "max_staleness": 0},
    "critic-kl": {"loss": "ppo_critic", "kl": "reward", "kl_coeff": 0.1, "max_staleness": 0, "gae_lambda": 0.9, "gae_gamma": 0.99},
    "pairs-all": {"loss": "dpo", "pairs": "all", "denominator": "groups", "beta": 0.5},
    "corrected": {"loss": "grpo", "m2_cap": 0.04, "icepop_low": 0.5, "icepop_high": 5.0, "dppo_low": 0.2, "dppo_high": 0.2, "kl_coeff": 0.01},
    "slow": {"loss": "grpo", "stale_rate_k": 1.0, "proximal_lag": 1, "entropy_coeff": 0.01},
}
RUNS = {loss.replace("_", "-"): {"loss": loss} for loss in LOSSES} | SETTINGS
STEPS = {name: 2 for name in RUNS} | {"slow": 4}


def config_of(name, **changes):
    algorithm = {"steps": STEPS.get(name, 2), "groups_per_batch": 2} | RUNS.get(name, {}) | changes.pop("algorithm", {})
    return run_config(name, algorithm=algorithm, num_tasks=0, **changes)


SIZES = {"sampler": {"num_lanes": 64, "num_slots": 48}, "learner": {"has_values": True, "num_slots": 16}, "keep_versions": 10}


async def _rows(state, *runs, **changes):
    """The version rows of each run, of a server on which all of them have ended."""
    async with serving(state, *runs, **(SIZES | changes)) as server:
        assert await server.finished() == {}
        return {config.name: await stored(server, store.versions, config.name) for config, _ in runs}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The state folder of one server on which all RUNS have trained, and their version rows."""
    state = tmp_path_factory.mktemp("losses") / "state"
    return state, asyncio.run(_rows(state, *((config_of(name), Letters) for name in RUNS)))


@pytest.mark.parametrize("name", RUNS)
def test_every_loss_of_a_run_file_takes_real_steps(trained, name):
    _, rows = trained
    assert len(rows[name]) == STEPS[name] + 1
    for before, after in zip(rows[name], rows[name][1:], strict=False):
        assert all(map(math.isfinite, after.metrics.values())), after.metrics
        assert after.record.checksum != before.record.checksum
        assert after.metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", ["ppo-critic", "critic-kl", "dpo", "pairs-all", "kl-reward", "slow", "corrected"])
def test_a_step_is_taken_again_bit_for_bit(trained, name):
    state, _ = trained
    assert retake(state, name, 2).is_equal


def test_a_penalty_in_the_reward_is_reported(trained):
    _, rows = trained
    for name in ("kl-reward", "critic-kl"):
        first, second = (row.metrics["kl_mean"] for row in rows[name][1:])
        assert first == pytest.approx(0.0, abs=1e-4)  # version 0 is the base
        assert second != pytest.approx(0.0, abs=1e-4)
    assert "kl_mean" not in rows["grpo"][1].metrics


def test_pairs_are_counted(trained):
    _, rows = trained
    assert all(row.metrics["num_pairs"] == 2 - row.metrics["num_groups_without_signal"] for row in rows["dpo"][1:])  # one of each other group
    assert all(row.metrics["num_pairs"] > 2 for row in rows["pairs-all"][1:])
    assert rows["dpo"][1].metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)  # the adapter is still the base


def test_a_stale_batch_is_trained_at_a_lower_rate(trained):
    _, rows = trained
    for row in rows["slow"][1:]:
        assert row.metrics["learning_rate"] == pytest.approx(1e-2 * row.metrics["rate_scale"], rel=1e-6)
        assert (row.metrics["rate_scale"] < 1) == (row.metrics["staleness_max"] > 0)
    assert min(row.metrics["rate_scale"] for row in rows["slow"][1:]) < 1
    assert "rate_scale" not in rows["grpo"][1].metrics


def test_a_run_with_a_critic_and_a_penalty_is_deterministic(tmp_path):
    alone, beside = (config_of("critic-kl", deterministic=True), Letters), (config_of("dpo"), Letters)
    first = asyncio.run(_rows(tmp_path / "alone", alone))["critic-kl"]
    second = asyncio.run(_rows(tmp_path / "beside", alone, beside))["critic-kl"]
    assert [row.record.checksum for row in first] == [row.record.checksum for row in second]
    assert [row.record.moments_checksum for row in first] == [row.record.moments_checksum for row in second]


def test_groups_without_distinct_rewards_have_no_pair_but_teach_a_critic(tmp_path):
    """Where every reward is 1/2, its values have nothing else to become. Batches hold different prompts, so ten are compared with ten."""
    limited, exact = {"max_batches_without_signal": 2}, {"steps": 50, "max_staleness": 0}
    critic = config_of("ppo-critic", algorithm=limited | exact, deterministic=True, adapter={"learning_rate": 2e-3})
    rows = asyncio.run(_rows(tmp_path / "state", (config_of("dpo", algorithm=limited), Constant), (critic, Constant)))
    assert len(rows["dpo"]) == 1
    values, errors = ([row.metrics[name] for row in rows["ppo-critic"][1:]] for name in ("value_mean", "value_error"))
    assert len(values) == 50
    assert values[0] == 0.0  # a new value head says 0
    assert np.mean(errors[-10:]) < np.mean(errors[:10]) / 2
    assert abs(np.mean(values[-10:]) - 0.5) < 0.25
