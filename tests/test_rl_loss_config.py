"""[algorithm] of a run file: which loss, with which settings."""

import dataclasses
import math

import pytest
from pydantic import ValidationError

from noria.config import AlgorithmConfig
from noria.rl.losses import LOSSES, loss_table, resolved, scope_of
from noria.types import LossSpec

RUN_LOSSES = AlgorithmConfig.model_fields["loss"].annotation.__args__


def algorithm(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig(steps=1, **settings)


def test_the_default_of_runs_is_grpo_with_truncated_weights_and_the_sequence_mask():
    spec = resolved(algorithm().loss_spec)
    assert spec == resolved(LossSpec())
    assert (spec.kind, spec.clip_low, spec.clip_high, spec.tis_cap, spec.sequence_mask_c) == ("grpo", 0.2, 0.28, 2.0, 1.2)
    assert (spec.kl_coeff, spec.entropy_coeff, spec.m2_cap, spec.icepop_high, spec.proximal_lag) == (0, 0, 0, 0, 0)
    assert algorithm().stale_rate_k == 0


@pytest.mark.parametrize("kind", RUN_LOSSES)
def test_a_loss_without_settings_is_that_kind_with_its_own_defaults(kind):
    assert kind in LOSSES
    spec = algorithm(loss=kind).loss_spec
    assert resolved(spec) == resolved(LossSpec(kind=kind))
    loss_table({0: spec}, 1)


def test_every_setting_of_a_loss_can_be_set_in_a_run_file():
    given = {
        "clip_low": 0.1,
        "clip_high": 0.3,
        "tis_cap": 1.5,
        "sequence_mask_c": 0.0,
        "icepop_low": 0.5,
        "icepop_high": 5.0,
        "m2_cap": 0.04,
        "dppo_low": 0.2,
        "dppo_high": 0.2,
        "kl_coeff": 0.01,
        "entropy_coeff": 0.001,
    }
    critic = {"loss": "ppo_critic", "value_coeff": 1.0, "value_clip": 0.1}
    specs = [algorithm(**given, **critic, kl="k2").loss_spec, algorithm(proximal_lag=1).loss_spec, algorithm(loss="dpo", beta=0.5).loss_spec]
    assert specs[0] == LossSpec(**given, kind="ppo_critic", value_coeff=1.0, value_clip=0.1, kl_estimator="k2")
    default = LossSpec()
    changed = {f.name for f in dataclasses.fields(LossSpec) for spec in specs if getattr(spec, f.name) != getattr(default, f.name)}
    assert changed == {f.name for f in dataclasses.fields(LossSpec)}
    assert scope_of(specs[0]) == "batch"


def test_a_penalty_in_the_reward_is_not_also_in_the_loss():
    assert algorithm(kl="reward", kl_coeff=0.1).loss_spec.kl_coeff == 0.0
    assert algorithm(kl="k1", kl_coeff=0.1).loss_spec.kl_coeff == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "dpo", "tis_cap": 2.0}, "does not read tis_cap"),
        ({"loss": "dpo", "kl_coeff": 0.1}, "does not read kl_coeff"),
        ({"beta": 0.1}, "does not read beta"),
        ({"loss": "dro", "clip_low": 0.1}, "does not read clip_low"),
        ({"loss": "ppo", "gae_lambda": 0.9}, "ppo_critic does"),
        ({"loss": "ppo", "proximal_lag": 1}, "grpo does"),
        ({"pairs": "all"}, "dpo does"),
        ({"sequence_mask_c": 0.5}, "would mask every episode"),
        ({"icepop_low": 6.0, "icepop_high": 5.0}, "every token would be masked"),
        ({"icepop_low": 0.5}, "without icepop_high"),
        ({"loss": "cross_entropy"}, "Input should be"),
        ({"clip_low": -0.1}, "greater than or equal to 0"),
        ({"beta": 0.0, "loss": "dpo"}, "greater than 0"),
        ({"kl_coeff": math.nan}, "kl_coeff"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        algorithm(**settings)


def test_a_written_out_configuration_reads_back_as_itself():
    for kind in RUN_LOSSES:
        config = algorithm(loss=kind, stale_rate_k=0.5)
        assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": "reward"},
        {"kl": "k1"},
        {"loss": "ppo_critic", "advantage": "mean"},
        {"loss": "ppo_critic", "zero_signal": "resample"},
        {"loss": "dpo", "advantage": "mean"},
        {"loss": "dpo", "zero_signal": "train"},
        {"loss": "dpo", "denominator": "episodes"},
    ],
)
def test_a_setting_without_an_effect_is_refused(settings):
    with pytest.raises(ValidationError, match=next(name for name in reversed(settings))):
        algorithm(**settings)
