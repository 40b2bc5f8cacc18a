"""Rotary positions (Su et al. 2021, RoFormer) reduced to numbers: the one parser of every spelling of their settings.

    config.json, older   rope_theta + rope_scaling {"type" | "rope_type", ...}   \
    config.json, newer   rope_parameters {"rope_type", "rope_theta", ...}          > settings (newer spelling) -> frequencies, factor
    GGUF                 <arch>.rope.* (model/gguf_model.py)                      /

The frequencies take the float32 roundings that `transformers` takes, since models were trained with those numbers: at position 8,000 a frequency that
is off by one unit in its last place turns the fastest pairs by 5e-4 radian. Only the power is computed in float64, so that it is rounded correctly.
Deliberately not here: angles and their application (`model/transformer.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileCorruptError, ModelUnsupportedError
from noria.types import FloatArray

Settings: TypeAlias = Mapping[str, Any]
"""One model's settings in the newer spelling: rope_type, rope_theta, and what the type needs. What is None counts as absent."""

DEFAULT_THETA: Final = 10_000.0
"""Base of the frequencies where a file states none: the paper's, and the default of transformers 5.24 and llama.cpp for every family noria reads."""

_ORIGINAL: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of one model.

    inverse_frequencies [H/2]: radians per position of each pair of dimensions, float32 values > 0. attention_factor: of cos and sin, > 0 (YaRN).
    settings: pairs of config.json's `rope_parameters` (newer spelling) that give these numbers, None if none do; not compared.

    Raises ModelFileCorruptError if a number is not finite or not > 0.
    """

    inverse_frequencies: tuple[float, ...] = field(repr=False)
    attention_factor: float = 1.0
    settings: tuple[tuple[str, Any], ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        wrong = next((x for x in (*self.inverse_frequencies, self.attention_factor) if not (math.isfinite(x) and x > 0)), None)
        if wrong is not None:
            raise ModelFileCorruptError(f"{wrong} is among the rotary frequencies and factors, expected finite numbers > 0")


def plain_rope(theta: float, head_dim: int) -> Rope:
    """Rotary positions without scaling: theta^(-2i / H)."""
    return read_rope({"rope_theta": theta}, head_dim, source="rope_theta")


def read_rope(settings: Settings, head_dim: int, *, source: str, divisors_F: FloatArray | None = None) -> Rope:
    """Reduce settings to numbers.

    head_dim: H, even. source: the file, for messages. divisors_F [H/2]: of the frequencies, as llama.cpp stores the scaling of Llama 3.1.

    Raises ModelUnsupportedError (a type or setting that noria does not implement), ModelFileCorruptError (a setting missing or out of range).
    """
    given = _Given({"rope_theta": DEFAULT_THETA} | {key: value for key, value in settings.items() if value is not None}, source)
    name = given.values.get("rope_type", "default")
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ModelUnsupportedError(f"{source}: rotary positions of type {name!r}; noria reads {', '.join(_TYPES)}")
    if unknown := sorted(given.values.keys() - {"rope_type", "rope_theta", "finetuned", *kind.keys}):
        raise ModelUnsupportedError(f"{source}: rotary positions of type {name!r} with {unknown[0]!r}, which noria does not implement")
    if divisors_F is not None and (name == "yarn" or divisors_F.shape != (head_dim // 2,) or not divisors_F.size):
        raise ModelUnsupportedError(f"{source}: rotary positions of type {name!r}, head size {head_dim}, with {divisors_F.size} divisors")
    exponent_F = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused by Rope
            power_F = np.power(given.number("rope_theta"), exponent_F.astype(np.float64)).astype(np.float32)
            inverse_F, factor = kind.scale(power_F, given)
            rope = Rope(tuple((inverse_F if divisors_F is None else inverse_F / divisors_F).tolist()), factor)
    except (ModelFileCorruptError, ArithmeticError, ValueError) as error:
        raise ModelFileCorruptError(f"{source}: rotary positions of type {name!r}: {error}") from error
    return replace(rope, settings=_written(given.values | {"rope_type": name}) if divisors_F is None else _as_llama3(rope, given, divisors_F))


def read_settings(fields: Mapping[str, Any], *, source: str) -> Settings:
    """The settings of a config.json in either spelling. Raises ModelFileCorruptError where they are no object, or contradict each other."""
    settings: dict[str, Any] = {}
    for key, value in _spelled(fields, source):
        if value is None or (key == "partial_rotary_factor" and value == 1):
            continue
        name = "rope_type" if key == "type" else key
        if settings.setdefault(name, value) != value:
            raise ModelFileCorruptError(f"{source}: rotary setting {name!r} is both {settings[name]!r} and {value!r}")
    if "rope_theta" not in settings and any(key == "rope_theta" for key, _ in _spelled(fields, source)):
        raise ModelFileCorruptError(f"{source}: rope_theta is None, expected a number; left out, it is {DEFAULT_THETA:g}")
    kind = _TYPES.get(str(settings.get("rope_type")))
    if kind is not None and _ORIGINAL in kind.keys:
        settings.setdefault(_ORIGINAL, fields.get(_ORIGINAL) or fields.get("max_position_embeddings"))
    return settings


def _spelled(fields: Mapping[str, Any], source: str) -> Iterator[tuple[str, Any]]:
    for spelling in ("rope_parameters", "rope_scaling"):
        value = fields.get(spelling) or {}
        if not isinstance(value, dict):
            raise ModelFileCorruptError(f"{source}: {spelling} is {value!r}, expected an object")
        yield from value.items()
    yield from ((key, fields[key]) for key in ("rope_theta", "partial_rotary_factor") if key in fields)


def _written(settings: Settings) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(settings.items()))


def _as_llama3(rope: Rope, given: "_Given", divisors_F: FloatArray) -> tuple[tuple[str, Any], ...] | None:
    """The settings of Llama 3.1 and later (Meta's own constants), if these divisors are what they give."""
    theta, head_dim = given.number("rope_theta"), 2 * len(divisors_F)
    shape = {"factor": float(np.max(divisors_F)), "low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}
    llama3 = read_rope({"rope_type": "llama3", "rope_theta": theta} | shape, head_dim, source=given.source)
    return llama3.settings if np.allclose(llama3.inverse_frequencies, rope.inverse_frequencies, rtol=1e-5, atol=0) else None


@dataclass(frozen=True, slots=True)
class _Given:
    """Settings that are there, none of them None, and whose they are."""

    values: dict[str, Any]
    source: str

    def number(self, key: str, default: float | None = None) -> float:
        """Raises ModelFileCorruptError if it is missing and has no default, or is not a finite number."""
        value = self.values.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise ModelFileCorruptError(f"setting {key!r} is {value!r}, expected a finite number")
        return value


_Scaled: TypeAlias = tuple[npt.NDArray[Any], float]
"""Inverse frequencies [H/2], float32, and the attention factor."""


def _default(power_F: FloatArray, given: _Given) -> _Scaled:
    return 1 / power_F, 1.0


def _linear(power_F: FloatArray, given: _Given) -> _Scaled:
    """Position interpolation (Chen et al. 2023)."""
    return 1 / power_F / given.number("factor"), 1.0


def _llama3(power_F: FloatArray, given: _Given) -> _Scaled:
    """Long waves are interpolated, short ones are kept, and those between are blended (Meta's Llama 3.1 release, `apply_scaling`)."""
    factor, low, high, original = (given.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL))
    inverse_F = 1 / power_F
    wave_F = 2 * math.pi / inverse_F
    smooth_F = (original / wave_F - low) / (high - low)
    blended_F = (1 - smooth_F) * inverse_F / factor + smooth_F * inverse_F
    kept_or_blended_F = np.where(wave_F < original / high, inverse_F, blended_F)
    return np.where(wave_F > original / low, inverse_F / factor, kept_or_blended_F), 1.0


def _yarn(power_F: FloatArray, given: _Given) -> _Scaled:
    """Peng et al. 2023, YaRN, sections 3.2 and 3.4, with the extensions of transformers (mscale, truncate)."""
    factor, original, theta = given.number("factor"), given.number(_ORIGINAL), given.number("rope_theta")

    def dimension_of(num_rotations: float) -> float:
        return 2 * len(power_F) * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(given.number("beta_fast", 32)), dimension_of(given.number("beta_slow", 1))
    if given.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(power_F) - 1)
    ramp_F = np.clip((np.arange(len(power_F), dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    kept_F = 1 - ramp_F
    return 1 / (factor * power_F) * (1 - kept_F) + 1 / power_F * kept_F, _yarn_attention_factor(factor, given)


def _yarn_attention_factor(factor: float, given: _Given) -> float:
    def sharper(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all = given.number("mscale", 0), given.number("mscale_all_dim", 0)
    return given.number("attention_factor", sharper(mscale) / sharper(mscale_all) if mscale and mscale_all else sharper(1.0))


@dataclass(frozen=True, slots=True)
class _Type:
    scale: Callable[[FloatArray, _Given], _Scaled]
    keys: tuple[str, ...] = ()


_TYPES: Final = {
    "default": _Type(_default),
    "linear": _Type(_linear, ("factor",)),
    "llama3": _Type(_llama3, ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    "yarn": _Type(_yarn, ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
}
