"""Losses: per-token outputs in, cotangents out. Runs with different losses share one pass, since kinds and settings are arrays and never static.

    learner_logprobs_M ──▶ every loss of the table LOSSES, on the entries of its kind ──▶ select by entry ──▶ cotangent_M

A pass evaluates all kinds, which is nothing beside the model. Each kind is shown only its own entries, so what one kind makes of numbers that belong
to another is never computed, and cannot leak.

A loss sees flat arrays over entries (M) and nothing else: no positions, no model, no microbatch. What it returns is the gradient of the run's
loss with respect to `learner_logprobs_M`; the learner pulls that through the model.

Rules that every loss here keeps:
    - ratios are exp of float32 log-ratios clamped to +-20;
    - entries that do not train (weight 0: padding) are selected away before and after the arithmetic, so nothing they hold can leak;
    - a NaN in an entry that trains is never hidden: it surfaces in that entry's cotangent;
    - an entry's result depends on its own sequence and its own run's settings only, bit for bit.

Shape letters: M entry, A adapter slot, Q sequence (one path of an episode; static size M: at most one per entry).
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from noria.errors import InvalidRequestError
from noria.types import LossKind, LossSpec

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8 is far outside any trust region, and its square is finite in float32."""


class LossTable(TypedDict):
    """The loss of the run in each adapter slot, [A]. kind: int32, the position in LOSSES; the settings: float32. See `LossSpec`."""

    kind: Any
    clip_low: Any
    clip_high: Any
    tis_cap: Any
    sequence_mask_c: Any


class LossInputs(NamedTuple):
    """What a loss reads of the entries beside the model's outputs, all [M].

    behavior_logprobs_M, advantage_M, weight_M: float32, weight 0 for padding. sequence_M: int32 in 0..M-1, all entries of a sequence contiguous
    and in these arrays. slot_M: int32 in 0..A-1, one slot per sequence.
    """

    behavior_logprobs_M: jax.Array
    advantage_M: jax.Array
    weight_M: jax.Array
    sequence_M: jax.Array
    slot_M: jax.Array


class LossMetrics(NamedTuple):
    """Sums per adapter slot, float32 [A]: a run's own, and additive over microbatches (add them with `jax.tree.map`). See `run_metrics`."""

    loss_A: jax.Array
    num_entries_A: jax.Array
    num_sequences_A: jax.Array
    ratio_A: jax.Array
    squared_log_ratio_A: jax.Array
    num_capped_A: jax.Array
    num_clipped_A: jax.Array
    num_masked_sequences_A: jax.Array
    entropy_A: jax.Array
    learner_logprobs_A: jax.Array


class LossTerms(NamedTuple):
    """A loss per entry, and what its metrics count: zeros where a loss has no ratio, no cap, no clip, no mask."""

    loss_M: jax.Array
    log_ratio_M: jax.Array
    is_capped_M: jax.Array
    is_clipped_M: jax.Array
    is_masked_M: jax.Array


def loss_table(specs: Mapping[int, LossSpec], num_slots: int) -> LossTable:
    """The losses of every slot; slots without one get the defaults. specs: by slot, 0 <= slot < num_slots.

    Raises InvalidRequestError: an unknown kind.
    """
    rows = [specs.get(slot, LossSpec()) for slot in range(num_slots)]
    numbers = {kind: number for number, kind in enumerate(LOSSES)}
    if unknown := [s.kind for s in rows if s.kind not in numbers]:
        raise InvalidRequestError(f"there is no loss {unknown[0]!r}; known: {', '.join(LOSSES)}")
    return LossTable(
        kind=np.array([numbers[s.kind] for s in rows], np.int32),
        clip_low=np.array([s.clip_low for s in rows], np.float32),
        clip_high=np.array([s.clip_high for s in rows], np.float32),
        tis_cap=np.array([s.tis_cap for s in rows], np.float32),
        sequence_mask_c=np.array([s.sequence_mask_c for s in rows], np.float32),
    )


def cotangents(learner_logprobs_M: jax.Array, entropy_M: jax.Array, inputs: LossInputs, table: LossTable) -> tuple[jax.Array, LossMetrics]:
    """Gradient of each run's summed loss with respect to `learner_logprobs_M`, float32 [M], and the metrics' sums per slot.

    learner_logprobs_M, entropy_M: float32 [M], nats, at each entry's temperature. The proximal policy is the learner itself, at this step (one batch
    is one optimizer step). Pure and jittable; no argument is static.
    """
    th_M = learner_logprobs_M.astype(jnp.float32)
    kind_M = table["kind"][inputs.slot_M]

    def gradient(number: int, loss: Loss) -> tuple[jax.Array, LossTerms]:
        own = inputs._replace(weight_M=jnp.where(kind_M == number, inputs.weight_M, 0.0))

        def summed(th_M: jax.Array) -> tuple[jax.Array, LossTerms]:
            terms = loss(th_M, jax.lax.stop_gradient(th_M), own, table)
            return terms.loss_M.sum(), terms

        return jax.grad(summed, has_aux=True)(th_M)

    selected, *others = (gradient(number, loss) for number, loss in enumerate(LOSSES.values()))
    for number, other in enumerate(others, 1):
        selected = jax.tree.map(lambda a_M, b_M, is_mine_M=kind_M == number: jnp.where(is_mine_M, b_M, a_M), selected, other)
    cotangent_M, terms = selected
    return cotangent_M, _metrics(terms, th_M, entropy_M.astype(jnp.float32), inputs=inputs, num_slots=len(table["kind"]))


def grpo_loss(learner_logprobs_M: jax.Array, proximal_logprobs_M: jax.Array, inputs: LossInputs, table: LossTable) -> LossTerms:
    """Decoupled PPO with corrections for off-policy data, per entry: `-weight * w * min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)`.

    u = exp(learner - proximal) is the ratio that is clipped (Hilton et al. 2021, arXiv 2110.00641; asymmetric clip: DAPO, arXiv 2503.14476);
    w = min(exp(proximal - behavior), tis_cap) is the detached truncated importance weight of the token, and 0 for a whole sequence whose geometric
    mean ratio exp(mean(proximal - behavior)) leaves [1 / c, c], c = sequence_mask_c, unless c is 0. Ratios are never multiplied twice: u corrects
    from the proximal policy, w from the behavior policy to it. At the step, where u = 1, the gradient of an entry is therefore
    -weight * min(exp(learner - behavior), tis_cap) * advantage, or 0 where its sequence is masked.

    proximal_logprobs_M: detached. Differentiable in learner_logprobs_M; the clip is a selection, so at its border the gradient is that of the open
    side, where `min` and `clip` would give half of it.
    """
    is_trained_M = inputs.weight_M != 0
    th_M = jnp.where(is_trained_M, learner_logprobs_M, 0.0)
    p_M = jax.lax.stop_gradient(jnp.where(is_trained_M, proximal_logprobs_M, 0.0))
    mu_M = jnp.where(is_trained_M, inputs.behavior_logprobs_M, 0.0)
    advantage_M = jnp.where(is_trained_M, inputs.advantage_M, 0.0)

    log_ratio_M = _clamp(p_M - mu_M)
    is_masked_M = _is_masked(log_ratio_M, is_trained_M, inputs.sequence_M, table["sequence_mask_c"][inputs.slot_M])
    tis_cap_M = table["tis_cap"][inputs.slot_M]
    ratio_M = jnp.exp(log_ratio_M)

    u_M = jnp.exp(_clamp(th_M - p_M))
    highest_M = 1.0 + table["clip_high"][inputs.slot_M]
    lowest_M = 1.0 - table["clip_low"][inputs.slot_M]
    is_clipped_M = jnp.where(advantage_M >= 0, u_M > highest_M, u_M < lowest_M)
    surrogate_M = jnp.where(is_clipped_M, jnp.where(advantage_M >= 0, highest_M, lowest_M), u_M) * advantage_M

    loss_M = -inputs.weight_M * jnp.minimum(ratio_M, tis_cap_M) * surrogate_M
    return LossTerms(
        loss_M=jnp.where(is_trained_M & ~is_masked_M, loss_M, 0.0),
        log_ratio_M=log_ratio_M,
        is_capped_M=is_trained_M & (ratio_M > tis_cap_M),
        is_clipped_M=is_trained_M & is_clipped_M,
        is_masked_M=is_masked_M,
    )


def cross_entropy_loss(learner_logprobs_M: jax.Array, proximal_logprobs_M: jax.Array, inputs: LossInputs, table: LossTable) -> LossTerms:
    """Maximum likelihood, per entry: `-weight * advantage * learner_logprobs`, where the advantage is the token's own weight, of either sign.

    It knows no other policy: proximal_logprobs_M, behavior_logprobs_M and all settings are ignored.
    """
    is_trained_M = inputs.weight_M != 0
    th_M = jnp.where(is_trained_M, learner_logprobs_M, 0.0)
    advantage_M = jnp.where(is_trained_M, inputs.advantage_M, 0.0)
    advantage_M = jnp.where(jnp.isnan(th_M), jnp.nan, advantage_M)  # the gradient alone would not show what the model has become
    zeros_M, nowhere_M = jnp.zeros_like(th_M), jnp.zeros_like(is_trained_M)
    loss_M = jnp.where(is_trained_M, -inputs.weight_M * advantage_M * th_M, 0.0)
    return LossTerms(loss_M=loss_M, log_ratio_M=zeros_M, is_capped_M=nowhere_M, is_clipped_M=nowhere_M, is_masked_M=nowhere_M)


Loss: TypeAlias = Callable[[jax.Array, jax.Array, LossInputs, LossTable], LossTerms]
"""(learner_logprobs_M, proximal_logprobs_M, inputs, table) -> terms, differentiable in the first. Trains the entries of non-zero weight only."""

LOSSES: Final[Mapping[LossKind, Loss]] = {"grpo": grpo_loss, "cross_entropy": cross_entropy_loss}
"""Every kind of loss; a kind's number in a LossTable is its position here."""


def _is_masked(log_ratio_M: jax.Array, is_trained_M: jax.Array, sequence_M: jax.Array, c_M: jax.Array) -> jax.Array:
    """Whether an entry's sequence has a geometric mean ratio outside [1 / c, c]. A NaN mean masks nothing: it must surface."""
    sum_Q = jax.ops.segment_sum(log_ratio_M, sequence_M, num_segments=len(sequence_M))
    count_Q = jax.ops.segment_sum(is_trained_M.astype(jnp.float32), sequence_M, num_segments=len(sequence_M))
    mean_M = (sum_Q / jnp.maximum(count_Q, 1.0))[sequence_M]
    is_on_M = c_M > 0
    return is_trained_M & is_on_M & (jnp.abs(mean_M) > jnp.log(jnp.where(is_on_M, c_M, 1.0)))


def _clamp(log_ratio_M: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _metrics(terms: LossTerms, th_M: jax.Array, entropy_M: jax.Array, *, inputs: LossInputs, num_slots: int) -> LossMetrics:
    is_trained_M = inputs.weight_M != 0
    # A sequence is counted at its first entry: entries of a sequence are contiguous.
    is_first_M = is_trained_M & jnp.concatenate([jnp.ones(1, bool), inputs.sequence_M[1:] != inputs.sequence_M[:-1]])

    def per_slot(value_M: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(jnp.where(is_trained_M, value_M, 0.0).astype(jnp.float32), inputs.slot_M, num_segments=num_slots)

    return LossMetrics(
        loss_A=per_slot(terms.loss_M),
        num_entries_A=per_slot(is_trained_M),
        num_sequences_A=per_slot(is_first_M),
        ratio_A=per_slot(jnp.exp(terms.log_ratio_M)),
        squared_log_ratio_A=per_slot(terms.log_ratio_M**2),
        num_capped_A=per_slot(terms.is_capped_M),
        num_clipped_A=per_slot(terms.is_clipped_M),
        num_masked_sequences_A=per_slot(terms.is_masked_M & is_first_M),
        entropy_A=per_slot(entropy_M),
        learner_logprobs_A=per_slot(th_M),
    )


def run_metrics(sums: LossMetrics, slot: int, kind: LossKind) -> dict[str, float]:
    """A run's metrics from its summed microbatches, as plain numbers; means of nothing are 0.

    Of every loss: loss; num_entries; entropy_mean: nats. Of cross_entropy: nll_mean: -learner_logprobs, nats per trained token, each counted once
    whatever its weight. Of a policy loss: ratio_mean: of exp(learner - behavior); mismatch_kl: the k2 estimate mean((learner - behavior)^2) / 2,
    nats; capped_fraction and clipped_fraction: of entries; masked_sequence_fraction: of sequences, by the geometric sequence mask.
    """

    def mean(sum_A: jax.Array, count_A: jax.Array = sums.num_entries_A) -> float:
        return float(sum_A[slot]) / max(float(count_A[slot]), 1.0)

    common = {"loss": float(sums.loss_A[slot]), "num_entries": float(sums.num_entries_A[slot]), "entropy_mean": mean(sums.entropy_A)}
    if kind == "cross_entropy":
        return {**common, "nll_mean": 0.0 - mean(sums.learner_logprobs_A)}
    return {
        **common,
        "ratio_mean": mean(sums.ratio_A),
        "mismatch_kl": mean(sums.squared_log_ratio_A) / 2,
        "capped_fraction": mean(sums.num_capped_A),
        "clipped_fraction": mean(sums.num_clipped_A),
        "masked_sequence_fraction": mean(sums.num_masked_sequences_A, sums.num_sequences_A),
    }
