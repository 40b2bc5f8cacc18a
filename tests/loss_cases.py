"""Builders of loss inputs from the tokens of `losses_reference`, and the specs that the tests of losses go through."""

from collections.abc import Sequence

import jax
import numpy as np
from losses_reference import POLICY, Sequence_, Token

from noria.rl.losses import LOSSES, LossInputs, LossMetrics, TokenCotangents, TokenOutputs, cotangents, loss_table
from noria.types import LossSpec

NUM_SLOTS = 40
jitted = jax.jit(cotangents)

PLAIN = {kind: LossSpec(kind=kind) for kind in LOSSES}
"""Every kind of the registry, with its own defaults."""

CORRECTIONS = {
    "none": {},
    "tis": {"tis_cap": 1.1},
    "sequence": {"sequence_mask_c": 1.1},
    "icepop": {"icepop_low": 0.8, "icepop_high": 1.3},
    "m2": {"m2_cap": 0.04},
    "dppo": {"dppo_low": 0.05, "dppo_high": 0.05},
    "all": {"tis_cap": 1.1, "sequence_mask_c": 1.2, "icepop_low": 0.7, "icepop_high": 1.5, "m2_cap": 0.06, "dppo_low": 0.1, "dppo_high": 0.1},
}
"""Settings by correction; the others are off."""
_OFF = {"tis_cap": 0.0, "sequence_mask_c": 0.0}

CORRECTED = {f"{kind}+{name}": LossSpec(kind=kind, **{**_OFF, **on}) for kind in POLICY for name, on in CORRECTIONS.items()}

REGULARIZED = {f"{kind}+kl": LossSpec(kind=kind, kl_coeff=0.3, entropy_coeff=0.01, **_OFF) for kind in POLICY} | {
    "grpo+k1": LossSpec(kl_coeff=0.1, kl_estimator="k1"),
    "ppo+k2": LossSpec(kind="ppo", kl_coeff=0.1, kl_estimator="k2"),
    "stable_reinforce+kl": LossSpec(kind="stable_reinforce", kl_coeff=0.2),
    "grpo+lag": LossSpec(proximal_lag=1, clip_low=0.05, clip_high=0.05),
    "ppo_critic+free": LossSpec(kind="ppo_critic", value_clip=0.0, value_coeff=1.0),
    "dpo+beta": LossSpec(kind="dpo", beta=1.5),
    "dro+beta": LossSpec(kind="dro", beta=1.0),
}

SPECS = PLAIN | REGULARIZED | {name: spec for name, spec in CORRECTED.items() if name.endswith("+all")}

OPTIONAL = ("reference_logprobs_M", "returns_M", "behavior_values_M", "pair_M", "staleness_M", "entropy_M", "value_M")


def arrays(sequences: Sequence[Sequence_], num_entries: int, first: int = 0) -> tuple[TokenOutputs, LossInputs]:
    """Entries of the sequences one after another from `first` on, padded with values that would poison any sum they leaked into."""
    rows = [(number, s, t) for number, s in enumerate(sequences) for t in s.tokens]
    pad = (first, num_entries - first - len(rows))

    def column(values: list[float], padding: float, dtype: type = np.float32) -> np.ndarray:
        return np.pad(np.array(values, dtype), pad, constant_values=padding)

    outputs = TokenOutputs(
        column([t.th for *_, t in rows], np.nan), column([t.entropy for *_, t in rows], np.nan), column([t.value for *_, t in rows], np.nan)
    )
    inputs = LossInputs(
        behavior_logprobs_M=column([t.mu for *_, t in rows], np.nan),
        advantage_M=column([t.advantage for *_, t in rows], np.inf),
        weight_M=column([t.weight for *_, t in rows], 0.0),
        sequence_M=column([number for number, *_ in rows], num_entries - 1, np.int32),
        slot_M=column([s.slot for _, s, _ in rows], 0, np.int32),
        reference_logprobs_M=column([t.ref for *_, t in rows], np.nan),
        returns_M=column([t.ret for *_, t in rows], np.nan),
        behavior_values_M=column([t.old_value for *_, t in rows], np.nan),
        pair_M=column([s.pair for _, s, _ in rows], 0, np.int32),
        staleness_M=column([t.staleness for *_, t in rows], 0, np.int32),
        is_outside_M=column([t.is_outside for *_, t in rows], True, bool),
    )
    return outputs, inputs


def run(sequences: Sequence[Sequence_], specs: dict[int, LossSpec], num_entries: int = 128, first: int = 0) -> tuple[TokenCotangents, LossMetrics]:
    """Cotangents of the sequences' entries, as NumPy arrays, and the sums."""
    outputs, inputs = arrays(sequences, num_entries, first)
    result, sums = jitted(outputs, inputs, loss_table(specs, NUM_SLOTS))
    num = sum(len(s.tokens) for s in sequences)
    whole = [np.asarray(d_M) for d_M in result]
    assert not any(d_M[:first].any() or d_M[first + num :].any() for d_M in whole), "padding has a cotangent"
    assert all(np.isfinite(m[NUM_SLOTS - 1]).all() for m in sums), "padding leaked into another slot"
    return TokenCotangents(*(d_M[first : first + num] for d_M in whole)), sums


def token(rng: np.random.Generator, shift: float = 0.0, spread: float = 0.3) -> Token:
    """A random entry whose log-ratio is about `shift`. All numbers are float32, so that the reference sees what the loss sees."""
    f = [float(np.float32(x)) for x in (-rng.exponential(2.0), rng.normal(), rng.normal(), rng.normal(), rng.normal(0, 0.3))]
    mu, advantage, value, ret, moved = f
    return Token(
        th=float(np.float32(min(mu + shift + rng.normal(0, spread), 0.0))),
        mu=mu,
        advantage=advantage,
        weight=float(np.float32(rng.choice([1.0, 1 / 3, 1e-6]))),
        ref=float(np.float32(mu + rng.normal(0, 0.5))),
        entropy=float(np.float32(rng.exponential())),
        value=value,
        old_value=float(np.float32(value + moved)),
        ret=ret,
        staleness=int(rng.integers(0, 4)),
    )


def sequence(rng: np.random.Generator, slot: int, length: int, *, pair: int = 0, side: float | None = None, weight: float = 0.5) -> Sequence_:
    """A random sequence; with a side, one of a pair: advantage +-1, one weight."""
    shift = float(rng.choice([0.0, 0.01, -0.15, 0.5]))
    tokens = [token(rng, shift) for _ in range(length)]
    for t in tokens:
        t.is_outside = bool(rng.random() < 0.1)
        if side is not None:
            t.advantage, t.weight = side, weight
    return Sequence_(slot, tokens, pair)


def batch(rng: np.random.Generator, specs: dict[int, LossSpec], num_sequences: int, max_length: int = 8) -> list[Sequence_]:
    """Sequences of random slots, empty ones too; those of dpo in pairs."""
    result: list[Sequence_] = []
    for _ in range(num_sequences):
        slot, length = int(rng.choice(list(specs))), int(rng.integers(0, max_length + 1))
        if specs[slot].kind == "dpo":
            number, weight = len(result), float(np.float32(rng.choice([1.0, 0.2])))
            result += [sequence(rng, slot, n, pair=number, side=side, weight=weight) for n, side in ((length, 1.0), (int(rng.integers(0, 5)), -1.0))]
        else:
            result.append(sequence(rng, slot, length))
    return result
