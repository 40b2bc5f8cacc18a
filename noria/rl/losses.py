"""Losses: token outputs in, cotangents out. Runs with different losses share one pass, since kinds and settings are arrays and never static.

    outputs, inputs ──view──▶ every loss of the table LOSSES ──select by entry──▶ + KL, entropy ──▶ cotangents [M], metrics [A]

A pass evaluates all kinds, which is nothing beside the model. The losses themselves are in `rl/loss_terms.py`, what drops tokens in
`rl/corrections.py`, the divergence from the reference in `rl/kl.py`, pairs in `rl/preference.py`, a critic's targets in `rl/returns.py`.

A loss sees flat arrays over entries (M) and nothing else: no positions, no model, no microbatch. What it returns are the derivatives of the run's
loss with respect to each of the token outputs; the learner pulls those through the model.

Rules that every loss here keeps:
    - a run's loss is a plain sum over its entries; a denominator is in their weights;
    - ratios are exp of float32 log-ratios clamped to +-20;
    - entries that do not train (weight 0: padding) are selected away before and after the arithmetic, so nothing they hold can leak;
    - no derivative is taken of a selection, so entries of one kind never leak into another, whatever that one makes of them;
    - a NaN in an entry that trains is never hidden: it surfaces in that entry's cotangent, unless its loss does not read it;
    - an entry's result depends on its own scope (`scope_of`) and its own run's settings only, bit for bit.

Shape letters: M entry, A adapter slot, Q sequence (one path of an episode; static size M: at most one per entry).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from noria.errors import InvalidRequestError
from noria.rl.corrections import clamp_log_ratio, dppo_mask, geometric_mask, icepop_mask, log_linear_proximal, second_moment_mask
from noria.rl.kl import KL_ESTIMATORS, kl_estimate
from noria.rl.loss_terms import (
    LossTerms,
    View,
    cispo_loss,
    cross_entropy_loss,
    dpo_loss,
    dro_loss,
    grpo_loss,
    gspo_loss,
    importance_sampling_loss,
    linear_loss,
    ppo_critic_loss,
    ppo_loss,
)
from noria.rl.sums import segment_sums
from noria.types import Entries, FloatArray, IntArray, LossKind, LossSpec

Scope: TypeAlias = Literal["token", "sequence", "pair", "batch"]


class TokenOutputs(NamedTuple):
    """What a loss may see of the model per entry, float32 [M].

    learner_logprobs_M: natural log, after temperature, full vocabulary. entropy_M: nats, of the same distribution. value_M: of the position that
    predicts, before the target is known; zeros where no slot has a value head.
    """

    learner_logprobs_M: jax.Array
    entropy_M: jax.Array
    value_M: jax.Array


class TokenCotangents(NamedTuple):
    """Derivatives of the sum of all runs' losses with respect to each token output, float32 [M]."""

    d_learner_logprobs_M: jax.Array
    d_entropy_M: jax.Array
    d_value_M: jax.Array


class LossInputs(NamedTuple):
    """What a loss reads of the entries beside the model's outputs, all [M]; see `loss_inputs_of`.

    behavior_logprobs_M, advantage_M, weight_M: float32, weight 0 for padding. sequence_M: int32 in 0..M-1, all entries of a sequence contiguous
    and in these arrays. slot_M: int32 in 0..A-1, one slot per sequence.

    Of some losses only, else zeros (`fields_read` says which a loss reads): reference_logprobs_M: float32, adapter off. returns_M,
    behavior_values_M: float32, targets of the critic and its values before the step. pair_M: int32 in 0..M-1, one for each pair in these arrays, on
    all entries of both its sequences. staleness_M: int32 >= 0, learner version - version that sampled the entry. is_outside_M: bool, the entry does
    not count in the means over its sequence.
    """

    behavior_logprobs_M: Any
    advantage_M: Any
    weight_M: Any
    sequence_M: Any
    slot_M: Any
    reference_logprobs_M: Any
    returns_M: Any
    behavior_values_M: Any
    pair_M: Any
    staleness_M: Any
    is_outside_M: Any


class LossTable(TypedDict):
    """The loss of the run in each adapter slot, [A]: kind and kl_estimator int32 (positions in LOSSES and KL_ESTIMATORS), the rest float32.

    The settings of a resolved `LossSpec`, as the losses compare with them: ratio_low, ratio_high are the bounds 1 - clip_low and 1 + clip_high, log_c
    the logarithm of sequence_mask_c; a bound that is off is infinite.
    """

    kind: Any
    ratio_low: Any
    ratio_high: Any
    beta: Any
    tis_cap: Any
    log_c: Any
    icepop_low: Any
    icepop_high: Any
    m2_cap: Any
    dppo_low: Any
    dppo_high: Any
    proximal_lag: Any
    kl_coeff: Any
    kl_estimator: Any
    entropy_coeff: Any
    value_coeff: Any
    value_clip: Any


@dataclass(frozen=True, slots=True)
class Loss:
    """One kind. terms: see `rl/loss_terms.py`. settings: its defaults where they are not those of `_DEFAULTS`. scope: of the loss alone.

    is_policy: corrections, KL and entropy apply. is_clipped: it clips a ratio. has_critic: it trains values. kl_to_behavior: its KL is to the
    behavior policy and not to the reference.
    """

    terms: Callable[[View], LossTerms]
    settings: Mapping[str, Any] = field(default_factory=dict)
    scope: Scope = "token"
    is_policy: bool = True
    is_clipped: bool = False
    has_critic: bool = False
    kl_to_behavior: bool = False


_DEFAULTS: Final[Mapping[str, Any]] = {"clip_low": 0.2, "clip_high": 0.2, "tis_cap": 0.0, "sequence_mask_c": 0.0, "beta": 0.1, "kl_estimator": "k3"}
"""What a setting that is None means, unless the kind says otherwise. Corrections are off."""

LOSSES: Final[Mapping[LossKind, Loss]] = {
    "grpo": Loss(grpo_loss, {"clip_high": 0.28, "tis_cap": 2.0, "sequence_mask_c": 1.2}, is_clipped=True),
    "cross_entropy": Loss(cross_entropy_loss, is_policy=False),
    "importance_sampling": Loss(importance_sampling_loss),
    "ppo": Loss(ppo_loss, is_clipped=True),
    "cispo": Loss(cispo_loss, {"clip_low": 1.0, "clip_high": 3.0}, is_clipped=True),
    "dro": Loss(dro_loss, {"beta": 0.05}),
    "gspo": Loss(gspo_loss, {"clip_low": 3e-4, "clip_high": 4e-4}, scope="sequence", is_clipped=True),
    "ppo_critic": Loss(ppo_critic_loss, is_clipped=True, has_critic=True),
    "dpo": Loss(dpo_loss, scope="pair", is_policy=False),
    "linear": Loss(linear_loss, is_policy=False),
    "stable_reinforce": Loss(importance_sampling_loss, {"tis_cap": 2.0, "kl_estimator": "k2"}, kl_to_behavior=True),
}
"""Every kind of loss; a kind's number in a LossTable is its position here."""


def resolved(spec: LossSpec) -> LossSpec:
    """The spec with its kind's defaults in place of every None. Raises InvalidRequestError: an unknown kind."""
    if spec.kind not in LOSSES:
        raise InvalidRequestError(f"there is no loss {spec.kind!r}; known: {', '.join(LOSSES)}")
    defaults = {**_DEFAULTS, **LOSSES[spec.kind].settings}
    return dataclasses.replace(spec, **{name: value for name, value in defaults.items() if getattr(spec, name) is None})


def scope_of(spec: LossSpec) -> Scope:
    """How far a loss of these settings must see at once: arrays that hold whole scopes give its exact result.

    "pair" is both sequences of every pair; "batch" all entries of the run's batch. Raises InvalidRequestError: an unknown kind.
    """
    s, loss = resolved(spec), LOSSES[spec.kind]
    if loss.is_policy and s.m2_cap:
        return "batch"
    if loss.is_policy and s.sequence_mask_c:
        return "sequence"
    return loss.scope


def fields_read(spec: LossSpec) -> frozenset[str]:
    """Which optional fields of LossInputs and TokenOutputs a loss of these settings reads: whoever feeds it has to fill them, or refuse the loss.

    Metrics read entropy_M whatever the loss. Raises InvalidRequestError: an unknown kind.
    """
    s, loss = resolved(spec), LOSSES[spec.kind]
    read = {
        "reference_logprobs_M": spec.kind == "dpo" or (loss.is_policy and s.kl_coeff != 0 and not loss.kl_to_behavior),
        "returns_M": loss.has_critic,
        "behavior_values_M": loss.has_critic and s.value_clip != 0,
        "value_M": loss.has_critic,
        "pair_M": loss.scope == "pair",
        "staleness_M": spec.kind == "grpo" and s.proximal_lag != 0,
        "entropy_M": loss.is_policy and s.entropy_coeff != 0,
    }
    return frozenset(name for name, is_read in read.items() if is_read)


def loss_table(specs: Mapping[int, LossSpec], num_slots: int) -> LossTable:
    """The losses of every slot; slots without one get the defaults. specs: by slot, 0 <= slot < num_slots.

    Raises InvalidRequestError: an unknown kind or estimator, a setting out of its range. ValueError, TypeError: a setting that is no number.
    """
    rows = [_row(specs.get(slot, LossSpec())) for slot in range(num_slots)]
    columns = {name: np.array([row[name] for row in rows], np.int32 if name in ("kind", "kl_estimator") else np.float32) for name in rows[0]}
    return LossTable(**columns)  # type: ignore[typeddict-item]


_SIGNED: Final = ("kl_coeff", "entropy_coeff")


def _row(spec: LossSpec) -> dict[str, float]:
    s = resolved(spec)
    number = {name: float(getattr(s, name)) for name in (f.name for f in dataclasses.fields(s)) if name not in ("kind", "kl_estimator")}
    for name, value in number.items():
        if not math.isfinite(value) or (value < 0 and name not in _SIGNED):
            raise InvalidRequestError(f"{name} = {value} of loss {s.kind}: must be finite{'' if name in _SIGNED else ' and not negative'}")
    if 0 < number["sequence_mask_c"] < 1:
        raise InvalidRequestError(f"sequence_mask_c = {s.sequence_mask_c} of loss {s.kind} would mask every sequence: 0 (off) or at least 1")
    if s.kl_estimator is None or s.kl_estimator not in KL_ESTIMATORS:
        raise InvalidRequestError(f"there is no KL estimator {s.kl_estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
    off_at_zero = ("tis_cap", "icepop_high", "m2_cap", "dppo_low", "dppo_high")
    row = {name: math.inf if name in off_at_zero and not value else value for name, value in number.items()}
    row["icepop_low"] *= bool(number["icepop_high"])
    row["ratio_low"], row["ratio_high"] = 1.0 - row.pop("clip_low"), 1.0 + row.pop("clip_high")
    row["log_c"] = math.log(c) if (c := row.pop("sequence_mask_c")) else math.inf
    return row | {"kind": list(LOSSES).index(s.kind), "kl_estimator": KL_ESTIMATORS[s.kl_estimator]}


def loss_inputs_of(entries: Entries, slot_M: IntArray, **others: FloatArray | IntArray) -> LossInputs:
    """The inputs of entries on the host. others: the optional fields by name; those not given are zeros."""
    floats, ints = np.zeros(len(entries), np.float32), np.zeros(len(entries), np.int32)
    optional = {
        "reference_logprobs_M": floats,
        "returns_M": floats,
        "behavior_values_M": floats,
        "pair_M": ints,
        "staleness_M": ints,
        "is_outside_M": np.zeros(len(entries), bool),
    }
    given = (entries.behavior_logprobs_M, entries.advantage_M, entries.weight_M, entries.sequence_M, slot_M)
    return LossInputs(*given, **{**optional, **others})


def cotangents(outputs: TokenOutputs, inputs: LossInputs, table: LossTable) -> tuple[TokenCotangents, "LossMetrics"]:
    """Derivatives of each run's summed loss with respect to its token outputs, and the metrics' sums per slot.

    Pure and jittable; no argument is static. Nothing of it is differentiable: the derivatives are in closed form.
    """
    is_trained_M = inputs.weight_M != 0
    outputs = TokenOutputs(*(_shown(is_trained_M, output_M) for output_M in outputs))
    view, masks = _view(outputs, inputs, table)
    each = [loss.terms(view) for loss in LOSSES.values()]
    terms = LossTerms(*(jax.lax.select_n(view.settings["kind"], *cases) for cases in zip(*each, strict=True)))
    terms, d_entropy_M, kl_M = _regularized(terms, view, outputs.entropy_M)
    terms = LossTerms(*(_shown(is_trained_M, term_M) for term_M in terms))
    result = TokenCotangents(terms.d_learner_logprobs_M, _shown(is_trained_M, d_entropy_M), terms.d_value_M)
    return result, _metrics(terms, view, masks, entropy_M=outputs.entropy_M, kl_M=kl_M, inputs=inputs, num_slots=len(table["kind"]))


def _shown(is_trained_M: jax.Array, x_M: jax.Array) -> jax.Array:
    return jnp.where(is_trained_M, x_M, jnp.zeros((), x_M.dtype))


def _is_of(kind_M: jax.Array, holds: Callable[[Loss], bool]) -> jax.Array:
    """Whether an entry's kind has a property."""
    return jnp.asarray([holds(loss) for loss in LOSSES.values()])[kind_M]


class _Masks(NamedTuple):
    """Where corrections drop an entry's whole sequence, or the entry alone."""

    is_sequence_masked_M: jax.Array
    is_token_masked_M: jax.Array


def _view(outputs: TokenOutputs, inputs: LossInputs, table: LossTable) -> tuple[View, _Masks]:
    settings = {name: column[inputs.slot_M] for name, column in {k: jnp.asarray(v) for k, v in table.items()}.items()}
    is_trained_M, s = inputs.weight_M != 0, settings
    floats = (inputs.behavior_logprobs_M, inputs.advantage_M, inputs.weight_M, inputs.reference_logprobs_M)
    mu_M, advantage_M, weight_M, reference_M = (_shown(is_trained_M, x_M.astype(jnp.float32)) for x_M in floats)
    th_M = outputs.learner_logprobs_M
    log_ratio_M = clamp_log_ratio(th_M - mu_M)
    sum_Q, count_Q = segment_sums(log_ratio_M, is_trained_M & ~inputs.is_outside_M, inputs.sequence_M, len(inputs.sequence_M))
    mean_M = (sum_Q / jnp.maximum(count_Q, 1.0))[inputs.sequence_M]

    proximal_M = log_linear_proximal(th_M, mu_M, inputs.staleness_M, s["proximal_lag"])
    ratio_M = jnp.exp(clamp_log_ratio(proximal_M - mu_M))
    is_weighed_M = jnp.isfinite(s["tis_cap"]) | jnp.isfinite(s["icepop_high"]) | jnp.isnan(ratio_M)  # a NaN must surface, weighed or not
    is_policy_M = is_trained_M & _is_of(s["kind"], lambda loss: loss.is_policy)
    is_sequence_masked_M = is_policy_M & geometric_mask(mean_M, s["log_c"])
    is_token_masked_M = is_policy_M & (
        icepop_mask(ratio_M, s["icepop_low"], s["icepop_high"])
        | dppo_mask(th_M, mu_M, advantage_M, s["dppo_low"], s["dppo_high"])
        | second_moment_mask(log_ratio_M, is_policy_M, inputs.slot_M, jnp.asarray(table["m2_cap"]))
    )
    view = View(
        th_M=th_M,
        mu_M=mu_M,
        proximal_M=proximal_M,
        reference_M=reference_M,
        advantage_M=advantage_M,
        weight_M=weight_M,
        value_M=outputs.value_M,
        behavior_value_M=_shown(is_trained_M, inputs.behavior_values_M),
        return_M=_shown(is_trained_M, inputs.returns_M),
        log_ratio_M=log_ratio_M,
        mean_log_ratio_M=mean_M,
        importance_M=jnp.where(is_weighed_M, jnp.minimum(ratio_M, s["tis_cap"]), 1.0),
        keep_M=jnp.where(is_sequence_masked_M | is_token_masked_M, 0.0, 1.0),
        pair_M=inputs.pair_M,
        is_paired_M=is_trained_M & _is_of(s["kind"], lambda loss: loss.scope == "pair"),
        settings=settings,
    )
    return view, _Masks(is_sequence_masked_M, is_token_masked_M)


def _regularized(terms: LossTerms, view: View, entropy_M: jax.Array) -> tuple[LossTerms, jax.Array, jax.Array]:
    """The terms with the penalty on KL and the bonus on entropy, the cotangent of the entropy, and the KL estimate where it is on.

    `+ weight * kl_coeff * KL - weight * entropy_coeff * entropy`. No correction weighs or drops them: a token that has gone too far to be trusted is
    the one to be held back.
    """
    s, is_policy_M = view.settings, _is_of(view.settings["kind"], lambda loss: loss.is_policy)
    to_behavior_M = _is_of(s["kind"], lambda loss: loss.kl_to_behavior)
    is_kl_M, is_entropy_M = is_policy_M & (s["kl_coeff"] != 0), is_policy_M & (s["entropy_coeff"] != 0)
    log_ratio_M = clamp_log_ratio(view.th_M - jnp.where(to_behavior_M, view.mu_M, view.reference_M))
    kl_M = kl_estimate(log_ratio_M, s["kl_estimator"])
    penalty_M, bonus_M = view.weight_M * s["kl_coeff"], view.weight_M * s["entropy_coeff"]
    loss_M = jnp.where(is_kl_M, terms.loss_M + penalty_M * kl_M, terms.loss_M)
    loss_M = jnp.where(is_entropy_M, loss_M - bonus_M * entropy_M, loss_M)
    slope_M = jnp.where(is_kl_M, terms.d_learner_logprobs_M + penalty_M * log_ratio_M, terms.d_learner_logprobs_M)
    d_entropy_M = jnp.where(is_entropy_M, jnp.where(jnp.isnan(entropy_M), jnp.nan, -bonus_M), 0.0)
    return terms._replace(loss_M=loss_M, d_learner_logprobs_M=slope_M), d_entropy_M, jnp.where(is_kl_M, kl_M, 0.0)


class LossMetrics(NamedTuple):
    """Sums per adapter slot, float32 [A]: a run's own, and additive over microbatches (add them with `jax.tree.map`). See `run_metrics`."""

    loss_A: jax.Array
    num_entries_A: jax.Array
    num_sequences_A: jax.Array
    ratio_A: jax.Array
    squared_log_ratio_A: jax.Array
    num_capped_A: jax.Array
    num_clipped_A: jax.Array
    num_masked_A: jax.Array
    num_masked_sequences_A: jax.Array
    entropy_A: jax.Array
    learner_logprobs_A: jax.Array
    kl_A: jax.Array
    num_kl_A: jax.Array
    value_A: jax.Array
    return_A: jax.Array
    squared_return_A: jax.Array
    squared_error_A: jax.Array
    num_value_clipped_A: jax.Array
    num_pairs_A: jax.Array
    num_right_pairs_A: jax.Array
    margin_A: jax.Array


def _metrics(
    terms: LossTerms, view: View, masks: _Masks, *, entropy_M: jax.Array, kl_M: jax.Array, inputs: LossInputs, num_slots: int
) -> LossMetrics:
    kind_M, index_M = view.settings["kind"], jnp.arange(len(inputs.slot_M))
    is_trained_M = inputs.weight_M != 0
    is_policy_M = is_trained_M & _is_of(kind_M, lambda loss: loss.is_policy)
    is_critic_M = is_trained_M & _is_of(kind_M, lambda loss: loss.has_critic)
    # A sequence is counted at its first entry: entries of a sequence are contiguous. Those of a pair need not be.
    is_first_M = is_trained_M & jnp.concatenate([jnp.ones(1, bool), inputs.sequence_M[1:] != inputs.sequence_M[:-1]])
    first_S = jax.ops.segment_min(jnp.where(view.is_paired_M, index_M, len(index_M)), inputs.pair_M, num_segments=len(index_M))
    is_pair_M = view.is_paired_M & (first_S[inputs.pair_M] == index_M)

    def per_slot(value_M: jax.Array, where_M: jax.Array = is_trained_M) -> jax.Array:
        return jax.ops.segment_sum(jnp.where(where_M, value_M, 0.0).astype(jnp.float32), inputs.slot_M, num_segments=num_slots)

    return LossMetrics(
        loss_A=per_slot(terms.loss_M),
        num_entries_A=per_slot(is_trained_M),
        num_sequences_A=per_slot(is_first_M),
        ratio_A=per_slot(jnp.exp(view.log_ratio_M), is_policy_M),
        squared_log_ratio_A=per_slot(view.log_ratio_M**2, is_policy_M),
        num_capped_A=per_slot(terms.is_capped_M),
        num_clipped_A=per_slot(terms.is_clipped_M),
        num_masked_A=per_slot(masks.is_token_masked_M),
        num_masked_sequences_A=per_slot(masks.is_sequence_masked_M, is_first_M),
        entropy_A=per_slot(entropy_M),
        learner_logprobs_A=per_slot(view.th_M),
        kl_A=per_slot(kl_M),
        num_kl_A=per_slot(view.settings["kl_coeff"] != 0, is_policy_M),
        value_A=per_slot(view.value_M, is_critic_M),
        return_A=per_slot(view.return_M, is_critic_M),
        squared_return_A=per_slot(view.return_M**2, is_critic_M),
        squared_error_A=per_slot((view.value_M - view.return_M) ** 2, is_critic_M),
        num_value_clipped_A=per_slot(terms.is_value_clipped_M),
        num_pairs_A=per_slot(is_pair_M),
        num_right_pairs_A=per_slot(terms.margin_M > 0, is_pair_M),
        margin_A=per_slot(terms.margin_M, is_pair_M),
    )


def run_metrics(sums: LossMetrics, slot: int, kind: LossKind) -> dict[str, float]:
    """A run's metrics from its summed microbatches, as plain numbers; means of nothing are 0.

    Of every loss: loss; num_entries; entropy_mean: nats. Of cross_entropy: nll_mean: -learner_logprobs, nats per trained token, each counted once
    whatever its weight. Of a policy loss: ratio_mean: of exp(learner - behavior); mismatch_kl: the k2 estimate mean((learner - behavior)^2) / 2,
    nats; capped_fraction: of entries, by tis_cap; clipped_fraction: of entries, if it clips; masked_fraction: of entries, by a mask of tokens;
    masked_sequence_fraction: of sequences, by the geometric sequence mask; kl_mean: the penalty's estimate, nats, if it is on. With a critic:
    value_mean; value_error: mean squared; value_clipped_fraction; explained_variance: 1 - error / variance of the returns, 0 if they do not vary. Of
    dpo: num_pairs; pair_accuracy: pairs with a margin above 0; margin_mean: nats.
    """

    def mean(sum_A: jax.Array, count_A: jax.Array = sums.num_entries_A) -> float:
        return float(sum_A[slot]) / max(float(count_A[slot]), 1.0)

    loss = LOSSES[kind]
    metrics = {"loss": float(sums.loss_A[slot]), "num_entries": float(sums.num_entries_A[slot]), "entropy_mean": mean(sums.entropy_A)}
    if kind == "cross_entropy":
        metrics["nll_mean"] = 0.0 - mean(sums.learner_logprobs_A)
    if loss.is_policy:
        metrics["ratio_mean"] = mean(sums.ratio_A)
        metrics["mismatch_kl"] = mean(sums.squared_log_ratio_A) / 2
        metrics["capped_fraction"] = mean(sums.num_capped_A)
        metrics["masked_fraction"] = mean(sums.num_masked_A)
        metrics["masked_sequence_fraction"] = mean(sums.num_masked_sequences_A, sums.num_sequences_A)
    if loss.is_clipped:
        metrics["clipped_fraction"] = mean(sums.num_clipped_A)
    if float(sums.num_kl_A[slot]):
        metrics["kl_mean"] = mean(sums.kl_A, sums.num_kl_A)
    if loss.has_critic:
        error, variance = mean(sums.squared_error_A), mean(sums.squared_return_A) - mean(sums.return_A) ** 2
        metrics["value_mean"], metrics["value_error"] = mean(sums.value_A), error
        metrics["value_clipped_fraction"] = mean(sums.num_value_clipped_A)
        metrics["explained_variance"] = 1.0 - error / variance if variance > 0 else 0.0
    if loss.scope == "pair":
        metrics["num_pairs"] = float(sums.num_pairs_A[slot])
        metrics["pair_accuracy"] = mean(sums.num_right_pairs_A, sums.num_pairs_A)
        metrics["margin_mean"] = mean(sums.margin_A, sums.num_pairs_A)
    return metrics
