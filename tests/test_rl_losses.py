"""Losses: against the formulas token by token, finite at the extremes, honest about NaN and about what they read, for every kind and correction."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from loss_cases import CORRECTED, NUM_SLOTS, OPTIONAL, PLAIN, SPECS, arrays, batch, jitted, run, sequence
from losses_reference import POLICY, Sequence_, Token, gradients

from noria.errors import InvalidRequestError
from noria.rl.losses import LOSSES, fields_read, loss_table, resolved, run_metrics, scope_of
from noria.types import LossSpec

every_loss = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_kind = pytest.mark.parametrize("kind", LOSSES)


def plain(slot: int, learner: list[float], behavior: list[float], advantage: float = 1.0, **settings: float) -> Sequence_:
    return Sequence_(slot, [Token(a, b, advantage, **settings) for a, b in zip(learner, behavior, strict=True)])


EVERYTHING = SPECS | CORRECTED


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.sets(st.sampled_from(list(EVERYTHING)), min_size=1, max_size=NUM_SLOTS - 1))
def test_cotangents_of_any_mixture_are_those_of_each_runs_own_formula(seed, num_sequences, names):
    specs = {slot: EVERYTHING[name] for slot, name in enumerate(sorted(names))}
    sequences = batch(np.random.default_rng(seed), specs, num_sequences)
    borders: list[float] = []
    want = gradients(sequences, specs, borders)
    assume(min(borders, default=1.0) > 1e-5)
    got, sums = run(sequences, specs, 256)
    np.testing.assert_allclose(got.d_learner_logprobs_M, [g.d_th for g in want], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(got.d_entropy_M, [g.d_entropy for g in want], rtol=1e-6)
    np.testing.assert_allclose(got.d_value_M, [g.d_value for g in want], rtol=1e-5, atol=1e-6)
    owner = [s.slot for s in sequences for _ in s.tokens]
    for slot in specs:
        losses = [g.loss for g, o in zip(want, owner, strict=True) if o == slot]
        np.testing.assert_allclose(sums.loss_A[slot], sum(losses), rtol=1e-5, atol=1e-5 * (1 + sum(map(abs, losses))))


@pytest.mark.parametrize("spec", EVERYTHING.values(), ids=EVERYTHING)
def test_each_loss_equals_its_formula(spec):
    for seed in range(2):
        sequences = batch(np.random.default_rng(seed), {0: spec}, 8, 12)
        borders: list[float] = []
        want = gradients(sequences, {0: spec}, borders)
        if min(borders, default=1.0) < 1e-5:
            continue
        got, _ = run(sequences, {0: spec})
        assert np.abs(got.d_learner_logprobs_M).max() > 0
        np.testing.assert_allclose(got.d_learner_logprobs_M, [g.d_th for g in want], rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(got.d_value_M, [g.d_value for g in want], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", CORRECTED.values(), ids=CORRECTED)
def test_every_correction_changes_something_and_none_is_the_loss_itself(spec):
    sequences = batch(np.random.default_rng(1), {0: spec}, 12, 8)
    got, _ = run(sequences, {0: spec})
    bare, _ = run(sequences, {0: dataclasses.replace(CORRECTED[f"{spec.kind}+none"])})
    is_same = got.d_learner_logprobs_M.tobytes() == bare.d_learner_logprobs_M.tobytes()
    assert is_same == (spec == CORRECTED[f"{spec.kind}+none"])


def test_the_ratio_and_its_truncation_are_never_multiplied():
    """exp(learner - behavior) = 3 under a cap of 2 trains with 2 in every loss that weighs by a ratio, and not with 6."""
    far = plain(0, [-1.0 + math.log(3.0)], [-1.0])
    for kind in ("grpo", "importance_sampling", "stable_reinforce"):
        got, _ = run([far], {0: LossSpec(kind=kind, tis_cap=2.0, sequence_mask_c=0.0)})
        assert got.d_learner_logprobs_M[0] == pytest.approx(-2.0, rel=1e-6)
    for kind in ("ppo", "cispo", "gspo", "ppo_critic"):
        got, _ = run([far], {0: LossSpec(kind=kind, tis_cap=2.0, clip_high=10.0)})
        assert got.d_learner_logprobs_M[0] == pytest.approx(-2.0, rel=1e-6)


@pytest.mark.parametrize("kind", [kind for kind, loss in LOSSES.items() if loss.is_clipped])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_clip_that_is_computed_is_read(kind, advantage):
    """A ratio far outside its bounds, in the direction that the advantage pushes, has a bounded gradient, or none."""
    learner = -1.0 + advantage * 0.9
    tight, wide = (LossSpec(kind=kind, clip_low=c, clip_high=c, tis_cap=0.0, sequence_mask_c=0.0, proximal_lag=5) for c in (0.01, 100.0))
    one = plain(0, [learner], [-1.0], advantage, staleness=1)
    (clipped, sums), (free, _) = run([one], {0: tight}), run([one], {0: wide})
    assert abs(free.d_learner_logprobs_M[0]) == pytest.approx(math.exp(learner + 1.0), rel=1e-5)
    assert abs(clipped.d_learner_logprobs_M[0]) == pytest.approx(1 + 0.01 * advantage if kind == "cispo" else 0.0)
    assert run_metrics(sums, 0, kind)["clipped_fraction"] == 1.0


@every_loss
def test_extreme_log_ratios_give_finite_results(spec):
    for x, advantage, is_learner in itertools.product((1e4, -1e4), (0.0, 1.0, -1.0), (True, False)):
        learner, behavior = (x, 0.0) if is_learner else (0.0, -x)
        extreme = Token(learner, behavior, advantage, ref=behavior, value=1e4, old_value=-1e4, ret=1.0, staleness=2)
        got, sums = run([Sequence_(0, [extreme, Token(-0.5, -0.5, advantage)])], {0: spec})
        assert all(np.isfinite(d_M).all() for d_M in got)
        assert all(np.isfinite(m).all() for m in sums)
        if advantage == 0 and spec.kind != "dro" and not spec.kl_coeff:
            assert not got.d_learner_logprobs_M.any()
        if LOSSES[spec.kind].is_policy:  # the exported ratio is that of the exported log-ratio
            metrics, clamped = run_metrics(sums, 0, spec.kind), max(-20.0, min(20.0, x))
            assert metrics["mismatch_kl"] == pytest.approx(clamped**2 / 4)
            assert metrics["ratio_mean"] == pytest.approx((math.exp(clamped) + 1) / 2, rel=1e-5)


@pytest.mark.parametrize("log_ratio", [3e38, -3e38])
@every_kind
def test_log_ratios_beyond_float32_are_clamped(log_ratio, kind):
    got, _ = run([plain(0, [-0.5, -0.5], [-log_ratio, -0.5])], {0: PLAIN[kind]})
    assert all(np.isfinite(d_M).all() for d_M in got)


FIELD = {"ref": "reference_logprobs_M", "value": "value_M", "old_value": "behavior_values_M", "ret": "returns_M", "entropy": "entropy_M"}


@every_loss
def test_a_nan_that_is_read_surfaces_and_stays_in_its_run(spec):
    read_names = {"th", "advantage", "weight", *(name for name, field in FIELD.items() if field in fields_read(spec))}
    if LOSSES[spec.kind].is_policy:
        read_names.add("mu")
    clean, _ = run([*sequence_pair(0), *sequence_pair(1)], {0: spec, 1: spec})
    for name in ("th", "mu", "advantage", "weight", *FIELD):
        good, bad = sequence_pair(1), sequence_pair(0)
        setattr(bad[0].tokens[1], name, math.nan)
        got, sums = run([*bad, *good], {0: spec, 1: spec})
        assert [d_M[6:].tobytes() for d_M in got] == [d_M[6:].tobytes() for d_M in clean], f"{name} leaked"
        assert np.isfinite(sums.loss_A[1])
        assert any(np.isnan(d_M[1]) for d_M in got) == (name in read_names), name
        assert bool(np.isnan(sums.loss_A[0])) == (name in read_names), name


def sequence_pair(slot: int) -> list[Sequence_]:
    """Both sides of a pair whose log-ratios are 0."""
    return [Sequence_(slot, [Token(-1.0, -1.0, side, ref=-1.5, value=0.5, old_value=0.45, ret=1.0) for _ in range(3)], slot) for side in (1.0, -1.0)]


@pytest.mark.parametrize("spec", CORRECTED.values(), ids=CORRECTED)
def test_a_nan_of_a_dropped_token_surfaces_as_well(spec):
    far = Sequence_(0, [Token(-0.1, -9.0, math.nan, ref=-1.0) for _ in range(3)])
    got, _ = run([far], {0: spec})
    assert np.isnan(got.d_learner_logprobs_M).all()


@pytest.mark.parametrize("length", [300, 30_000])
@every_kind
def test_a_long_episode_of_constant_ratio_neither_under_nor_overflows(kind, length):
    x = math.log(0.7)
    tokens = [Token(-1.0 + x, -1.0, 1.0, ref=-1.0) for _ in range(length)]
    spec = LossSpec(kind=kind, clip_low=0.9, clip_high=9.0, tis_cap=2.0, sequence_mask_c=1.5)
    got, sums = run([Sequence_(0, tokens)], {0: spec}, 32_768)
    expected = {"dro": -0.7 * (1 - 0.05 * x), "cross_entropy": -1.0, "linear": 1.0, "dpo": -0.1 / (1 + math.exp(max(0.1 * length * x, -700)))}
    np.testing.assert_allclose(got.d_learner_logprobs_M, expected.get(kind, -0.7), rtol=1e-5)
    metrics = run_metrics(sums, 0, kind)
    assert all(math.isfinite(value) for value in metrics.values())
    if kind == "dpo":
        assert metrics["margin_mean"] == pytest.approx(0.1 * length * float(np.float32(-1.0 + x) + 1), rel=1e-6), "a sum of 30,000 terms is exact"
    if kind in POLICY:
        got, sums = run([Sequence_(0, tokens)], {0: dataclasses.replace(spec, sequence_mask_c=1.2)}, 32_768)
        assert not got.d_learner_logprobs_M.any()
        assert run_metrics(sums, 0, kind)["masked_sequence_fraction"] == 1.0


@every_loss
def test_what_does_not_train_changes_nothing(spec):
    """A fully masked row leaves the loss and every gradient as they are, bit for bit; a batch of nothing else costs 0."""
    rng = np.random.default_rng(5)
    row, masked = batch(rng, {0: spec}, 5), sequence(rng, 0, 6, pair=0)
    for t in masked.tokens:
        t.weight, t.mu, t.ref, t.advantage = 0.0, math.nan, math.inf, math.nan
    alone, sums = run(row, {0: spec})
    beside, more = run([masked, *row], {0: spec})
    assert [d_M[6:].tobytes() for d_M in beside] == [d_M.tobytes() for d_M in alone]
    assert not any(d_M[:6].any() for d_M in beside)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(sums, more, strict=True))
    nothing, none = run([masked], {0: spec})
    assert not any(d_M.any() for d_M in nothing)
    assert not any(np.asarray(m).any() for m in none)


@every_kind
def test_sequences_and_batches_without_tokens_are_fine(kind):
    for sequences in ([], [Sequence_(0, [])], [Sequence_(0, []), Sequence_(0, [Token(-1.0, -1.0)])]):
        got, sums = run(sequences, {0: PLAIN[kind]})
        assert all(np.isfinite(d_M).all() for d_M in got)
        assert all(math.isfinite(value) for value in run_metrics(sums, 0, kind).values())
        assert run_metrics(sums, 0, kind)["num_entries"] == sum(len(s.tokens) for s in sequences)


@every_loss
def test_a_loss_reads_what_it_says_and_nothing_else(spec):
    sequences = batch(np.random.default_rng(3), {0: spec}, 6)
    outputs, inputs = arrays(sequences, 128)
    table = loss_table({0: spec}, NUM_SLOTS)
    want, _ = jitted(outputs, inputs, table)
    read = fields_read(spec)
    assert read <= set(OPTIONAL)
    rng = np.random.default_rng(4)
    for name in OPTIONAL:
        owner = outputs if name in outputs._fields else inputs
        values = getattr(owner, name)
        noise = rng.integers(0, 3, 128) if values.dtype == np.int32 else rng.normal(0, 1, 128)
        other = owner._replace(**{name: (values + noise).astype(values.dtype)})
        got, _ = jitted(other if owner is outputs else outputs, inputs if owner is outputs else other, table)
        is_same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(got, want, strict=True))
        if name == "entropy_M":
            assert is_same, "the gradient of an entropy bonus does not depend on the entropy's value"
        else:
            assert is_same == (name not in read), name


@every_loss
def test_an_entrys_result_depends_on_its_scope_and_on_nothing_further(spec):
    """Change one token: what changes lies in its scope, and where the scope is more than the token, others there do change."""
    rng = np.random.default_rng(11)
    sequences = [sequence(rng, 0, 5, pair=k // 2, side=(1.0, -1.0)[k % 2]) for k in range(6)]
    before, _ = run(sequences, {0: spec})
    sequences[2].tokens[1].th -= 4.0
    sequences[2].tokens[1].is_outside = False
    after, _ = run(sequences, {0: spec})
    changed = {m for m in range(30) if any(a[m] != b[m] for a, b in zip(before, after, strict=True))}
    token, whole, pair = {11}, set(range(10, 15)), set(range(10, 20))
    allowed = {"token": token, "sequence": whole, "pair": pair, "batch": set(range(30))}[scope_of(spec)]
    assert changed <= allowed
    if LOSSES[spec.kind].scope == "pair":
        assert changed == pair
    if spec.kind == "gspo" and scope_of(spec) == "sequence":
        assert changed - token


def test_scopes_follow_the_settings():
    assert {kind: scope_of(LossSpec(kind=kind, sequence_mask_c=0.0)) for kind in LOSSES} == {
        **dict.fromkeys(LOSSES, "token"),
        "gspo": "sequence",
        "dpo": "pair",
    }
    assert scope_of(LossSpec()) == "sequence"
    assert {scope_of(LossSpec(kind=kind, m2_cap=0.04)) for kind in POLICY} == {"batch"}
    assert scope_of(LossSpec(kind="dpo", m2_cap=0.04, sequence_mask_c=1.2)) == "pair"
    assert scope_of(LossSpec(kind="cross_entropy", m2_cap=0.04)) == "token"


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5e-42, 1e-38, 3.4e38, 0.1, -7.0])
def test_a_callers_cotangent_is_passed_on_bit_for_bit(value):
    spec = LossSpec(kind="linear", kl_coeff=0.5, entropy_coeff=0.5)
    got, _ = run([plain(0, [-1.0, -0.25], [math.nan, 3.0], value)], {0: spec})
    assert got.d_learner_logprobs_M.tobytes() == np.full(2, value, np.float32).tobytes()
    assert not got.d_entropy_M.any()


def test_the_sequence_mask_judges_each_sequence_by_its_own_mean():
    kept = plain(0, [-1.0, -1.3, -0.7], [-1.0, -1.0, -1.0])
    masked = plain(0, [-1.0, -1.6], [-1.0, -1.0])
    unmasked = dataclasses.replace(masked, slot=1)
    got, sums = run([kept, masked, unmasked], {0: LossSpec(sequence_mask_c=1.2), 1: LossSpec(sequence_mask_c=0.0)})
    slope = got.d_learner_logprobs_M
    assert slope[3:5].tolist() == [0.0, 0.0]
    assert (slope[:3] < 0).all()
    assert (slope[5:] < 0).all()
    assert run_metrics(sums, 0, "grpo")["masked_sequence_fraction"] == 0.5
    assert run_metrics(sums, 1, "grpo")["masked_sequence_fraction"] == 0.0


def test_an_entry_outside_the_mean_trains_with_its_sequences_ratio():
    tokens = [Token(-1.0, -1.0), Token(-1.0, -1.2), Token(-1.0, -9.0, is_outside=True)]
    got, _ = run([Sequence_(0, tokens)], {0: LossSpec(kind="gspo", clip_low=0.5, clip_high=0.5)})
    np.testing.assert_allclose(got.d_learner_logprobs_M, -math.exp(0.1), rtol=1e-6)


TINKER = {
    "cross_entropy": (LossSpec(kind="cross_entropy"), lambda r, a, lp, q: -lp * a),
    "importance_sampling": (LossSpec(kind="importance_sampling"), lambda r, a, lp, q: -r * a),
    "ppo": (LossSpec(kind="ppo", clip_low=1 - 0.8, clip_high=1.2 - 1), lambda r, a, lp, q: -min(r * a, np.clip(r, 0.8, 1.2) * a)),
    "cispo": (LossSpec(kind="cispo", clip_low=1 - 0.0, clip_high=4.0 - 1), lambda r, a, lp, q: -np.clip(r, 0.0, 4.0) * lp * a),
    "dro": (LossSpec(kind="dro", beta=0.05), lambda r, a, lp, q: -(lp * a - 0.5 * 0.05 * (lp - q) ** 2)),
}


@pytest.mark.parametrize("name", TINKER)
def test_tinkers_losses_are_plain_sums_of_weight_one(name):
    spec, loss = TINKER[name]
    tokens = sequence(np.random.default_rng(2), 0, 40).tokens
    for t in tokens:
        t.weight = 1.0
    _, sums = run([Sequence_(0, tokens)], {0: spec})
    assert float(sums.loss_A[0]) == pytest.approx(sum(loss(math.exp(t.th - t.mu), t.advantage, t.th, t.mu) for t in tokens), rel=1e-5)
    by_default, _ = run([Sequence_(0, tokens)], {0: LossSpec(kind=name)})
    assert by_default.d_learner_logprobs_M.tobytes() == run([Sequence_(0, tokens)], {0: spec})[0].d_learner_logprobs_M.tobytes()


def test_the_table_has_a_row_per_slot():
    table = loss_table({1: LossSpec(0.1, 0.2, 3.0, 1.1, "cross_entropy", beta=0.5)}, 3)
    assert {k: v.dtype for k, v in table.items()} == {
        **dict.fromkeys(table, np.dtype(np.float32)),
        "kind": np.dtype(np.int32),
        "kl_estimator": np.dtype(np.int32),
    }
    assert table["kind"].tolist() == [0, 1, 0]
    wanted = {"ratio_low": 0.9, "ratio_high": 1.2, "tis_cap": 3.0, "log_c": math.log(1.1), "beta": 0.5}
    assert {k: table[k][1].item() for k in wanted} == pytest.approx(wanted)
    assert (table["ratio_low"][0], table["ratio_high"][0], table["tis_cap"][0]) == (np.float32(0.8), np.float32(1.28), 2.0)
    assert all(table[k][0] == np.inf for k in ("icepop_high", "m2_cap", "dppo_low", "dppo_high"))


def test_defaults_are_those_of_each_kind_and_given_settings_win():
    assert resolved(LossSpec()) == LossSpec(0.2, 0.28, 2.0, 1.2, beta=0.1, kl_estimator="k3")
    assert resolved(LossSpec(kind="stable_reinforce")).tis_cap == 2.0
    assert resolved(LossSpec(kind="stable_reinforce")).kl_estimator == "k2"
    assert resolved(LossSpec(kind="gspo", clip_low=0.5)) == LossSpec(0.5, 4e-4, 0.0, 0.0, "gspo", beta=0.1, kl_estimator="k3")
    assert resolved(LossSpec(tis_cap=0.0)).tis_cap == 0.0


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec(kind="mse"),
        LossSpec(sequence_mask_c=0.5),
        LossSpec(clip_low=-0.1),
        LossSpec(tis_cap=math.nan),
        LossSpec(kl_coeff=math.inf),
        LossSpec(kl_estimator="k4"),
        LossSpec(m2_cap=-1.0),
    ],
)
def test_a_spec_out_of_range_is_refused_by_name(spec):
    with pytest.raises(InvalidRequestError, match=r"mse|sequence_mask_c|clip_low|tis_cap|kl_coeff|k4|m2_cap"):
        loss_table({0: spec}, 2)


def test_a_setting_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="two"):
        loss_table({0: LossSpec(tis_cap="two")}, 1)
