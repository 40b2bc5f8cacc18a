"""Losses, corrections, KL and returns once more, in float64 and token by token, written from the formulas. Gradients by central differences.

`th` is what is differentiated; `th0`, its value, is what a stop-gradient sees. Log-ratios are kept within +-20 by whoever makes the cases. `borders`
collects how far each decision (clip, cap, mask) was from going the other way, so that a test can keep away from where rounding decides.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from noria.types import LossSpec

DEFAULTS = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 2.0, "sequence_mask_c": 1.2},
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"clip_low": 1.0, "clip_high": 3.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "ppo_critic": {"clip_low": 0.2, "clip_high": 0.2},
    "dpo": {"beta": 0.1},
    "linear": {},
    "stable_reinforce": {"tis_cap": 2.0, "kl_estimator": "k2"},
}
"""The table of section 1 of the algorithms: what a setting that is not given means. Others are off."""

POLICY = ("grpo", "importance_sampling", "ppo", "cispo", "dro", "gspo", "ppo_critic", "stable_reinforce")


@dataclass
class Token:
    """One entry."""

    th: float
    mu: float
    advantage: float = 1.0
    weight: float = 1.0
    ref: float = -1.0
    entropy: float = 1.0
    value: float = 0.0
    old_value: float = 0.0
    ret: float = 0.0
    staleness: int = 0
    is_outside: bool = False


@dataclass
class Sequence_:
    """One path: its slot, its tokens, and the pair that it belongs to."""

    slot: int
    tokens: list[Token]
    pair: int = 0


@dataclass
class Gradient:
    """Of one entry: its loss, and the derivatives with respect to the three outputs."""

    loss: float
    d_th: float
    d_entropy: float = 0.0
    d_value: float = 0.0


@dataclass
class Settings:
    """A spec with the defaults filled in; None is off."""

    kind: str
    lo: float
    hi: float
    cap: float | None
    c: float | None
    beta: float
    spec: LossSpec
    borders: list[float] = field(default_factory=list)


def settings_of(spec: LossSpec) -> Settings:
    default = DEFAULTS[spec.kind]

    def of(name: str) -> float:
        given = getattr(spec, name)
        return default.get(name, 0.0) if given is None else given

    return Settings(spec.kind, 1 - of("clip_low"), 1 + of("clip_high"), of("tis_cap") or None, of("sequence_mask_c") or None, of("beta"), spec)


def gradients(sequences: Sequence[Sequence_], specs: dict[int, LossSpec], borders: list[float]) -> list[Gradient]:
    """Of every entry, in order."""
    result: dict[int, Gradient] = {}
    for slot in {s.slot for s in sequences}:
        mine = [s for s in sequences if s.slot == slot]
        settings = settings_of(specs[slot])
        settings.borders = borders
        of_slot = _pairs(mine, settings) if settings.kind == "dpo" else _plain(mine, settings)
        result |= {id(token): gradient for token, gradient in zip((t for s in mine for t in s.tokens), of_slot, strict=True)}
    return [result[id(t)] for s in sequences for t in s.tokens]


def _plain(sequences: list[Sequence_], s: Settings) -> list[Gradient]:
    kept_by_m2 = second_moment_kept([t.th - t.mu for q in sequences for t in q.tokens], s.spec.m2_cap, s.borders)
    result = []
    for q in sequences:
        inside = [t.th - t.mu for t in q.tokens if not t.is_outside]
        mean = sum(inside) / len(inside) if inside else 0.0
        for t in q.tokens:
            is_kept = kept_by_m2.pop(0) and _is_kept(t, mean, s)
            gradient = Gradient(*_with_derivative(lambda th, t=t, k=is_kept, m=mean: t.weight * _loss(th, t, k, m, s), t.th))
            result.append(_regularized(gradient, t, s) if s.kind in POLICY else gradient)
    return result


def _with_derivative(f: Callable[[float], float], at: float) -> tuple[float, float]:
    step = 1e-6
    return f(at), (f(at + step) - f(at - step)) / (2 * step)


def proximal(t: Token, lag: float) -> float:
    """log p = log mu + a (log th - log mu), a = (v_p - v_mu) / (v_th - v_mu)."""
    v_th, v_mu = float(t.staleness), 0.0
    v_p = max(v_th - lag, v_mu)
    a = 1.0 if v_th == v_mu else (v_p - v_mu) / (v_th - v_mu)
    return t.mu + a * (t.th - t.mu)


def _is_kept(t: Token, mean: float, s: Settings) -> bool:
    """The masks of one token but M2PO's."""
    p = proximal(t, s.spec.proximal_lag)
    kept = True
    if s.c:
        s.borders.append(abs(abs(mean) - math.log(s.c)))
        kept &= 1 / s.c <= math.exp(mean) <= s.c
    if s.spec.icepop_high:
        r = math.exp(p - t.mu)
        s.borders += [abs(r - s.spec.icepop_low), abs(r - s.spec.icepop_high)]
        kept &= s.spec.icepop_low <= r <= s.spec.icepop_high
    moved = math.exp(t.th) - math.exp(t.mu)
    if s.spec.dppo_high:
        s.borders.append(abs(moved - s.spec.dppo_high))
        kept &= not (t.advantage > 0 and moved > s.spec.dppo_high)
    if s.spec.dppo_low:
        s.borders.append(abs(moved + s.spec.dppo_low))
        kept &= not (t.advantage < 0 and moved < -s.spec.dppo_low)
    return kept


def second_moment_kept(log_ratios: Sequence[float], cap: float, borders: list[float]) -> list[bool]:
    """Mask the largest squares until the mean of the rest is at most cap."""
    kept = [True] * len(log_ratios)
    while cap and any(kept):
        left = [x**2 for x, k in zip(log_ratios, kept, strict=True) if k]
        borders.append(abs(sum(left) / len(left) - cap))
        if sum(left) / len(left) <= cap:
            break
        kept = [k and x**2 < max(left) for x, k in zip(log_ratios, kept, strict=True)]
    return kept


def _loss(th: float, t: Token, is_kept: bool, mean: float, s: Settings) -> float:
    """Of a token of weight 1, as a function of th."""
    a, r0 = t.advantage, math.exp(t.th - t.mu)
    r = math.exp(th - t.mu)
    if s.kind in ("cross_entropy", "linear"):
        return a * th if s.kind == "linear" else -a * th
    if not is_kept:
        return 0.0
    p = proximal(t, s.spec.proximal_lag) if s.kind == "grpo" else t.th
    weight = min(math.exp(p - t.mu), s.cap or math.inf) if s.cap or s.spec.icepop_high else 1.0
    match s.kind:
        case "grpo":
            return -weight * _clip_min(math.exp(th - p), a, s)
        case "importance_sampling" | "stable_reinforce":
            return -_truncation(r0, s) * r * a
        case "ppo" | "ppo_critic":
            return -_truncation(r0, s) * _clip_min(r, a, s)
        case "gspo":
            return -_truncation(math.exp(mean), s) * _clip_min(math.exp(mean + th - t.th), a, s)
        case "cispo":
            clipped = min(max(r0, s.lo), s.hi)
            s.borders += [abs(r0 - s.lo), abs(r0 - s.hi)]
            return -_truncation(clipped, s) * clipped * a * th
        case "dro":
            return -weight * (th * a - 0.5 * s.beta * (th - t.mu) ** 2)
    raise AssertionError(s.kind)


def _clip_min(ratio: float, a: float, s: Settings) -> float:
    s.borders += [abs(ratio - s.lo), abs(ratio - s.hi)]
    return min(ratio * a, min(max(ratio, s.lo), s.hi) * a)


def _truncation(ratio: float, s: Settings) -> float:
    """What brings a ratio down to the cap; never a second ratio."""
    return min(ratio, s.cap) / ratio if s.cap else 1.0


def kl_value(x: float, estimator: str) -> float:
    """x = learner - reference."""
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]


def _regularized(g: Gradient, t: Token, s: Settings) -> Gradient:
    coeff, estimator = s.spec.kl_coeff, s.spec.kl_estimator or DEFAULTS[s.kind].get("kl_estimator", "k3")
    x = t.th - (t.mu if s.kind == "stable_reinforce" else t.ref)
    g.loss += t.weight * coeff * kl_value(x, estimator)
    g.d_th += t.weight * coeff * x
    g.loss -= t.weight * s.spec.entropy_coeff * t.entropy
    g.d_entropy = -t.weight * s.spec.entropy_coeff
    if s.kind == "ppo_critic":
        loss, g.d_value = _with_derivative(lambda v: t.weight * s.spec.value_coeff * _squared_error(v, t, s), t.value)
        g.loss += loss
    return g


def _squared_error(v: float, t: Token, s: Settings) -> float:
    c = s.spec.value_clip
    if not c:
        return (v - t.ret) ** 2
    clipped = t.old_value + min(max(v - t.old_value, -c), c)
    s.borders += [abs(abs(v - t.old_value) - c), abs((v - t.ret) ** 2 - (clipped - t.ret) ** 2) if clipped != v else 1.0]
    return max((v - t.ret) ** 2, (clipped - t.ret) ** 2)


def _pairs(sequences: list[Sequence_], s: Settings) -> list[Gradient]:
    """-log sigmoid(beta ((th_c - ref_c) - (th_r - ref_r))) per pair, spread over its entries; differentiated token by token."""
    result = []
    for q in sequences:
        pair = [t for other in sequences if other.pair == q.pair for t in other.tokens]

        for t in q.tokens:

            def loss(th: float, t: Token = t, pair: list[Token] = pair) -> float:
                margin = s.beta * sum(u.advantage * ((th if u is t else u.th) - u.ref) for u in pair)
                return t.weight * math.log1p(math.exp(-margin))

            value, slope = _with_derivative(loss, t.th)
            result.append(Gradient(value / len(pair), slope))
    return result


def naive_gae(
    turns: Sequence[tuple[Sequence[float], float]], *, gae_lambda: float, gamma: float, last_value: float = 0.0
) -> tuple[list[float], list[float]]:
    """Advantages and returns by the definition: the discounted sum of all later temporal differences. turns: values of its tokens, reward."""
    values = [v for turn, _ in turns for v in turn]
    rewards = [0.0] * len(values)
    done = 0
    for turn, reward in turns:
        done += len(turn)
        if done:
            rewards[done - 1] += reward
    following = [*values[1:], last_value]
    deltas = [rewards[m] + gamma * following[m] - values[m] for m in range(len(values))]
    advantages = [sum((gamma * gae_lambda) ** (k - m) * deltas[k] for k in range(m, len(values))) for m in range(len(values))]
    return advantages, np.add(advantages, values).tolist()
