"""Settings of rotary positions: one parser, both spellings, and no guesses. Angles against transformers are in test_model_families.py."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from family_models import LLAMA3, ORIGINAL, YARN, llama3_divisors

from noria.errors import ModelFileCorruptError, ModelUnsupportedError
from noria.model.rope import Rope, plain_rope, read_rope, read_settings
from noria.model.transformer import rotary_angles
from noria.model.weights import load_base

ALL_TYPES = "default, linear, llama3, yarn"


def rope_of(fields: dict[str, Any], head_dim: int = 64) -> Rope:
    return read_rope(read_settings(fields, source="config.json"), head_dim, source="config.json")


def test_plain_frequencies_are_powers_of_the_base() -> None:
    expected = [10_000.0 ** (-2 * i / 64) for i in range(32)]
    np.testing.assert_allclose(plain_rope(10_000.0, 64).inverse_frequencies, expected, rtol=2e-7)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN])
def test_both_spellings_give_the_same_numbers(scaling: dict[str, Any] | None) -> None:
    older = rope_of({"rope_theta": 500_000.0, "rope_scaling": scaling})
    settings = {("rope_type" if key == "type" else key): value for key, value in (scaling or {}).items()}
    newer = rope_of({"rope_parameters": settings | {"rope_theta": 500_000.0}})
    assert older == newer
    assert hash(older) == hash(newer)
    assert older.settings is not None
    assert rope_of({"rope_parameters": dict(older.settings)}) == older, "what is written is read as the same"


def test_the_base_is_read_in_either_place_and_matters() -> None:
    """The failure of case 51: a base that is not found, and 10,000 in its place."""
    assert rope_of({"rope_theta": 1e6}) == rope_of({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}) == plain_rope(1e6, 64)
    assert rope_of({}) == plain_rope(10_000.0, 64)
    assert plain_rope(1e6, 64) != plain_rope(10_000.0, 64)


def test_no_original_length_means_the_models_own() -> None:
    short = {key: value for key, value in YARN.items() if key != ORIGINAL}
    given = rope_of({"rope_theta": 1e6, "rope_scaling": short | {ORIGINAL: 4096}})
    assert rope_of({"rope_theta": 1e6, "rope_scaling": short, "max_position_embeddings": 4096}) == given
    assert rope_of({"rope_theta": 1e6, "rope_scaling": short, "max_position_embeddings": 8192, ORIGINAL: 4096}) == given


def test_divisors_of_llama_cpp_are_llama_3_1s_scaling() -> None:
    settings = {"rope_theta": 500_000.0} | LLAMA3 | {ORIGINAL: 8192}
    divided = read_rope({"rope_theta": 500_000.0}, 128, source="gguf", divisors_F=llama3_divisors(settings, 128))
    direct = read_rope(settings, 128, source="config.json")
    np.testing.assert_allclose(divided.inverse_frequencies, direct.inverse_frequencies, rtol=1e-6)
    assert divided.settings == direct.settings, "recognized, so that it can be written as Hugging Face spells it"
    other = read_rope({"rope_theta": 500_000.0}, 128, source="gguf", divisors_F=np.linspace(1, 7, 64, dtype=np.float32))
    assert other.settings is None


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, f"'dynamic'; noria reads {ALL_TYPES}"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, f"'longrope'; noria reads {ALL_TYPES}"),
        ({"rope_scaling": {"type": ["yarn"]}}, "noria reads"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "'mrope'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_scaling": YARN | {"new_idea": 1.0}}, "new_idea"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_what_noria_does_not_implement_is_refused_by_name(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=match):
        rope_of(fields)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "both 1000000.0 and 10000.0"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "rope_type.*both"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is None"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "expected finite numbers > 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "'factor' is True"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "'factor' is inf"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "'factor'"),
        ({"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "high_freq_factor"}}, "high_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0.0}}, "type 'llama3'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ORIGINAL),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, "type 'yarn'"),
        ({"rope_scaling": YARN | {"attention_factor": -1.0}}, "-1.0 is among"),
        ({"rope_scaling": "yarn"}, "expected an object"),
        ({"rope_theta": -1.0}, "> 0"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta is None, expected a number; left out, it is 10000"),
    ],
)
def test_settings_that_are_missing_or_out_of_range_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelFileCorruptError, match=match):
        rope_of(fields)


def test_yarns_attention_factor_scales_what_attention_sees() -> None:
    """cos and sin of every angle are both as long as the factor: 0.1 ln(4) + 1 for a factor of 4, or what the file states."""
    for settings, factor in ((YARN, 0.1 * math.log(4.0) + 1), (YARN | {"attention_factor": 0.9}, 0.9), ({"type": "linear", "factor": 4.0}, 1.0)):
        config = replace(load_base("tiny").config, rope=rope_of({"rope_theta": 1e6, "rope_scaling": settings}, 16))
        cos, sin = rotary_angles(config, jnp.array([[0, 1, 100, 500]]))
        np.testing.assert_allclose(cos[0, 0], factor, rtol=1e-6)
        np.testing.assert_allclose(np.hypot(cos, sin), factor, rtol=1e-5)
