"""Losses: against the formulas episode by episode, finite at the extremes, honest about NaN, and blind to neighbours."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rl_batches import algorithm, forked_batch

from noria.rl.losses import LOSSES, LossInputs, LossMetrics, LossTable, cotangents, grpo_loss, loss_table, run_metrics
from noria.rl.packing import ReadyRun, cut, pack, plan_microbatch, shapes_up_to
from noria.rl.tree import build_tree
from noria.types import LossSpec, Microbatch

FREE = LossSpec(sequence_mask_c=0.0)
jitted = jax.jit(cotangents)


@dataclasses.dataclass
class EpisodeCase:
    """One episode of the tests: its slot, and per token (learner, behavior, advantage, weight)."""

    slot: int
    learner: Sequence[float]
    behavior: Sequence[float]
    advantage: float = 1.0
    weight: float = 1.0


def arrays(sequences: Sequence[EpisodeCase], num_entries: int) -> tuple[jax.Array, LossInputs]:
    """Entries of the episodes one after another, padded with values that would poison any sum they leaked into."""
    num = sum(len(s.learner) for s in sequences)
    pad = (0, num_entries - num)

    def column(values: list[float], padding: float, dtype: type = np.float32) -> jax.Array:
        return jnp.asarray(np.pad(np.array(values, dtype), pad, constant_values=padding))

    per_token = [(s, k) for s in sequences for k in range(len(s.learner))]
    inputs = LossInputs(
        behavior_logprobs_M=column([s.behavior[k] for s, k in per_token], np.nan),
        advantage_M=column([s.advantage for s, _ in per_token], np.inf),
        weight_M=column([s.weight for s, _ in per_token], 0.0),
        sequence_M=column([e for e, s in enumerate(sequences) for _ in s.learner], num_entries - 1, np.int32),
        slot_M=column([s.slot for s, _ in per_token], 0, np.int32),
    )
    return column([s.learner[k] for s, k in per_token], np.nan), inputs


def naive_cotangents(sequences: Sequence[EpisodeCase], specs: dict[int, LossSpec]) -> list[float]:
    """-w A min(exp(learner - behavior), C), or 0 for an episode out of the geometric bounds, in float64, token by token; -w A of cross-entropy."""
    result = []
    for s in sequences:
        spec = specs[s.slot]
        if spec.kind == "cross_entropy":
            result += [-s.weight * s.advantage] * len(s.learner)
            continue
        log_ratios = [float(np.clip(a - b, -20, 20)) for a, b in zip(s.learner, s.behavior, strict=True)]
        mean = sum(log_ratios) / max(len(log_ratios), 1)
        is_masked = spec.sequence_mask_c > 0 and abs(mean) > np.log(spec.sequence_mask_c)
        result += [0.0 if is_masked else -s.weight * s.advantage * min(np.exp(x), spec.tis_cap) for x in log_ratios]
    return result


def run(sequences: Sequence[EpisodeCase], specs: dict[int, LossSpec], num_entries: int = 64) -> tuple[np.ndarray, LossMetrics]:
    learner_M, inputs = arrays(sequences, num_entries)
    cotangent_M, metrics = jitted(learner_M, jnp.ones(num_entries), inputs, loss_table(specs, 5))
    num = sum(len(s.learner) for s in sequences)
    assert not np.asarray(cotangent_M)[num:].any(), "padding has a cotangent"
    assert all(np.isfinite(m[4]).all() for m in metrics), "padding leaked into another slot"
    return np.asarray(cotangent_M)[:num], metrics


logprobs = st.lists(st.floats(-30, 0, width=32), min_size=0, max_size=12)


@st.composite
def sequences(draw: st.DrawFn) -> list[EpisodeCase]:
    result = []
    for _ in range(draw(st.integers(0, 5))):
        behavior = draw(logprobs)
        shift = draw(st.sampled_from([0.0, 0.01, -0.15, 0.5, -30.0]))
        noise = draw(st.lists(st.floats(-1, 1, width=32), min_size=len(behavior), max_size=len(behavior)))
        learner = [b + shift + 0.1 * n for b, n in zip(behavior, noise, strict=True)]
        result.append(
            EpisodeCase(draw(st.integers(0, 3)), learner, behavior, draw(st.floats(-3, 3, width=32)), draw(st.sampled_from([1.0, 1 / 3, 1e-6])))
        )
    return result


SPECS = {0: LossSpec(), 1: FREE, 2: LossSpec(clip_low=0.0, clip_high=0.0, tis_cap=1.0, sequence_mask_c=1.5), 3: LossSpec(kind="cross_entropy")}


@settings(max_examples=150, deadline=None)
@given(sequences())
def test_cotangents_are_those_of_each_runs_own_loss(episodes):
    for s in episodes:  # keep away from the mask's border, where rounding decides
        mean = np.mean([np.clip(a - b, -20, 20) for a, b in zip(s.learner, s.behavior, strict=True)] or [0.0])
        assume(all(abs(abs(mean) - np.log(c)) > 1e-4 for c in (1.2, 1.5)))
    got, metrics = run(episodes, SPECS)
    np.testing.assert_allclose(got, naive_cotangents(episodes, SPECS), rtol=2e-5, atol=1e-12)
    for slot in SPECS:
        mine = [s for s in episodes if s.slot == slot and len(s.learner)]
        assert metrics.num_entries_A[slot] == sum(len(s.learner) for s in mine)
        assert metrics.num_sequences_A[slot] == len(mine)
        assert metrics.num_clipped_A[slot] == 0  # the ratio to the proximal policy is 1


def test_the_gradient_is_that_of_the_written_loss_with_the_clip_at_work():
    rng = np.random.default_rng(0)
    episodes = [EpisodeCase(k % 3, rng.uniform(-3, 0, 12).tolist(), rng.uniform(-3, 0, 12).tolist(), (-1.0) ** k, 0.1) for k in range(5)]
    learner_M, inputs = arrays(episodes, 64)
    table = {k: jnp.asarray(v) for k, v in loss_table({s: dataclasses.replace(SPECS[s], sequence_mask_c=0.0) for s in range(3)}, 4).items()}
    proximal_M = learner_M + jnp.asarray(rng.uniform(-0.5, 0.5, 64), jnp.float32)

    def per_entry(th_M: jax.Array) -> jax.Array:
        return grpo_loss(th_M, proximal_M, inputs, table).loss_M

    gradient_M = jax.grad(lambda th_M: per_entry(th_M).sum())(learner_M)
    step = 2.0**-10
    finite_M = (per_entry(learner_M + step) - per_entry(learner_M - step)) / (2 * step)
    np.testing.assert_allclose(gradient_M[:60], finite_M[:60], atol=2e-4)
    terms = grpo_loss(learner_M, proximal_M, inputs, table)
    assert 5 < int(terms.is_clipped_M.sum()) < 55
    for m in range(60):
        spec = SPECS[int(inputs.slot_M[m])]
        u = float(np.exp(learner_M[m] - proximal_M[m]))
        w = min(float(np.exp(proximal_M[m] - inputs.behavior_logprobs_M[m])), spec.tis_cap)
        a = float(inputs.advantage_M[m])
        expected = -0.1 * w * min(u * a, float(np.clip(u, 1 - spec.clip_low, 1 + spec.clip_high)) * a)
        assert float(terms.loss_M[m]) == pytest.approx(expected, rel=1e-5)
        assert (float(gradient_M[m]) == 0.0) == bool(terms.is_clipped_M[m])


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 3e38, -3e38])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("spec", SPECS.values())
def test_extreme_log_ratios_give_finite_results(log_ratio, advantage, spec):
    got, metrics = run([EpisodeCase(0, [log_ratio, -0.5], [0.0, -0.5], advantage)], {0: spec})
    assert np.isfinite(got).all()
    assert all(np.isfinite(m).all() for m in metrics)
    if advantage == 0:
        assert not got.any()


@pytest.mark.parametrize(
    ("spec", "field"),
    [(spec, f) for spec in SPECS.values() for f in ("learner", "behavior", "advantage", "weight") if (spec.kind, f) != ("cross_entropy", "behavior")],
)
def test_a_nan_that_trains_surfaces_and_stays_in_its_episode(spec, field):
    good = EpisodeCase(1, [-1.0, -2.0], [-1.0, -2.0])
    bad = EpisodeCase(0, [-1.0, -2.0], [-1.0, -2.0])
    setattr(bad, field, [-1.0, np.nan] if field in ("learner", "behavior") else np.nan)
    got, metrics = run([bad, good], {0: spec, 1: spec})
    assert np.isnan(got[1])
    assert got[2:].tolist() == [-1.0, -1.0]
    assert np.isnan(metrics.loss_A[0])
    assert metrics.loss_A[1] == (3.0 if spec.kind == "cross_entropy" else -2.0)


@pytest.mark.parametrize("length", [300, 30_000])
def test_a_long_episode_of_constant_ratio_neither_under_nor_overflows(length):
    episode = EpisodeCase(0, [-1.0 + np.log(0.7)] * length, [-1.0] * length)
    for spec, expected in ((FREE, -0.7), (LossSpec(sequence_mask_c=1.5), -0.7), (LossSpec(sequence_mask_c=1.2), 0.0)):
        got, metrics = run([episode], {0: spec}, num_entries=32_768)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        summary = run_metrics(metrics, 0, "grpo")
        assert summary["ratio_mean"] == pytest.approx(0.7, rel=1e-2)
        assert summary["masked_sequence_fraction"] == (expected == 0)


def test_the_sequence_mask_judges_each_episode_by_its_own_mean():
    kept = EpisodeCase(0, [-1.0, -1.3, -0.7], [-1.0, -1.0, -1.0])
    masked = EpisodeCase(0, [-1.0, -1.6], [-1.0, -1.0])
    unmasked = dataclasses.replace(masked, slot=1)
    got, metrics = run([kept, masked, unmasked], {0: LossSpec(sequence_mask_c=1.2), 1: FREE})
    assert got[3:5].tolist() == [0.0, 0.0]
    assert (got[:3] < 0).all()
    assert (got[5:] < 0).all()
    assert run_metrics(metrics, 0, "grpo")["masked_sequence_fraction"] == 0.5
    assert run_metrics(metrics, 1, "grpo")["masked_sequence_fraction"] == 0.0


def test_metrics_are_the_runs_own_means():
    log_ratios = np.array([0.0, np.log(3.0), -np.log(2.0)])
    one = EpisodeCase(2, (log_ratios - 1).tolist(), [-1.0] * 3, advantage=2.0, weight=0.25)
    other = EpisodeCase(0, [-5.0], [-1.0], advantage=-1.0)
    _, metrics = run([other, one], {0: FREE, 2: FREE})
    expected = {
        "loss": -0.25 * 2.0 * (1.0 + 2.0 + 0.5),
        "num_entries": 3.0,
        "ratio_mean": (1 + 3 + 0.5) / 3,
        "mismatch_kl": (log_ratios**2).mean() / 2,
        "capped_fraction": 1 / 3,
        "clipped_fraction": 0.0,
        "masked_sequence_fraction": 0.0,
        "entropy_mean": 1.0,
    }
    assert run_metrics(metrics, 2, "grpo") == pytest.approx(expected, rel=1e-6)
    assert run_metrics(metrics, 1, "grpo") == dict.fromkeys(expected, 0.0)


def test_metrics_of_cross_entropy_have_no_ratio():
    one = EpisodeCase(3, [-2.0, -0.5, -1.0], [0.0] * 3, advantage=-3.0, weight=0.25)
    _, metrics = run([EpisodeCase(0, [-5.0], [-1.0]), one], SPECS)
    expected = {"loss": -0.25 * -3.0 * -3.5, "num_entries": 3.0, "entropy_mean": 1.0, "nll_mean": 3.5 / 3}
    assert run_metrics(metrics, 3, "cross_entropy") == pytest.approx(expected, rel=1e-6)
    assert run_metrics(metrics, 1, "cross_entropy") == dict.fromkeys(expected, 0.0)


def test_each_kinds_numbers_have_the_bits_of_its_loss_alone_beside_any_others():
    rng = np.random.default_rng(0)
    mixed = [EpisodeCase(k % 4, (-rng.uniform(0, 3, 12)).tolist(), (-rng.uniform(0, 3, 12)).tolist(), rng.normal(), 0.1) for k in range(5)]
    learner_M, inputs = arrays(mixed, 64)
    table = loss_table(SPECS, 4)
    got_M, _ = jitted(learner_M, jnp.ones(64), inputs, table)
    kind_M = np.asarray(table["kind"])[np.asarray(inputs.slot_M)]
    for number, loss in enumerate(LOSSES.values()):
        alone = jax.jit(jax.grad(lambda th_M, loss=loss: loss(th_M, jax.lax.stop_gradient(th_M), inputs, table).loss_M.sum()))(learner_M)
        is_mine_M = (kind_M == number) & (np.arange(64) < 60)
        assert is_mine_M.sum() >= 12
        assert np.asarray(got_M)[is_mine_M].tobytes() == np.asarray(alone)[is_mine_M].tobytes()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_no_kind_reads_of_its_entries_cannot_leak_out_of_another_kind(poison):
    """Cross-entropy has no behavior policy: whatever stands in its place, and whatever the other kinds would make of it."""
    examples = EpisodeCase(3, [-1.0, -2.0], [poison, poison], advantage=2.0)
    episode = EpisodeCase(1, [-1.0, -2.0], [-1.0, -2.0])
    got, metrics = run([examples, episode], SPECS)
    assert got.tolist() == [-2.0, -2.0, -1.0, -1.0]
    assert all(np.isfinite(m).all() for m in metrics)


def test_a_new_mixture_of_kinds_and_settings_compiles_nothing():
    traces = []
    counted = jax.jit(lambda *args: traces.append(1) or cotangents(*args))
    for turn in range(4):
        specs = {slot: SPECS[(slot + turn) % 4] for slot in range(4)}
        learner_M, inputs = arrays([EpisodeCase(slot, [-1.0], [-1.0]) for slot in range(4)], 64)
        counted(learner_M, jnp.ones(64), inputs, loss_table(specs, 4))
    assert len(traces) == 1


def learner_logprobs(batch: Microbatch) -> np.ndarray:
    """Stand-in for a model: some function of the behavior log-prob and the target."""
    e = batch.entries
    return (e.behavior_logprobs_M + 0.3 * np.sin(e.target_M + e.behavior_logprobs_M)).astype(np.float32)


def trained(batches: Sequence[Microbatch], slot: int, table: LossTable) -> tuple[np.ndarray, dict[str, float]]:
    """A slot's cotangents over all passes, in order, and its metrics."""
    parts, sums = [], None
    for batch in batches:
        e = batch.entries
        inputs = LossInputs(e.behavior_logprobs_M, e.advantage_M, e.weight_M, e.sequence_M, batch.slot_M)
        cotangent_M, metrics = jitted(learner_logprobs(batch), np.ones(len(e), np.float32), inputs, table)
        parts.append(np.asarray(cotangent_M)[: batch.num_entries][batch.slot_M[: batch.num_entries] == slot])
        sums = metrics if sums is None else jax.tree.map(jnp.add, sums, metrics)
    assert sums is not None
    return np.concatenate(parts), run_metrics(sums, slot, list(LOSSES)[table["kind"][slot]])


@pytest.mark.parametrize("denominator", ["tokens", "episodes", "groups", "none"])
def test_a_runs_cotangents_are_bit_equal_alone_split_and_beside_neighbours(denominator):
    tree, _ = build_tree(forked_batch(8, 8, prompt=60), algorithm(denominator=denominator))
    shapes = shapes_up_to(1024)
    table = loss_table({1: LossSpec(sequence_mask_c=1.05), 2: FREE, 3: LossSpec(kind="cross_entropy")}, 4)
    pieces = cut(tree, shapes[1])
    assert len(pieces) >= 8
    mine = ReadyRun("mine", 1, pieces)
    others = [ReadyRun(f"other-{s}", s, cut(build_tree(forked_batch(1, seed=s), algorithm())[0], shapes[1])) for s in (2, 3)]

    def passes(runs: list[ReadyRun], size: int) -> list[Microbatch]:
        """Passes of at most `size` of the run's pieces."""
        result = []
        for start in range(0, len(pieces), size):
            here = [dataclasses.replace(r, pieces=r.pieces[start : start + size]) if r.run_id == "mine" else r for r in runs]
            result += [pack(plan_microbatch([r for r in here if r.pieces], shapes_up_to(4096), 4096))]
        return result

    whole, metrics = trained(passes([mine], len(pieces)), 1, table)
    assert len(whole) == len(tree.entries)
    assert (whole == 0).any()
    assert (whole != 0).any()
    for batches in (passes([mine], 1), passes([mine], 2), passes([mine], 8), passes([*others, mine], 2)):
        split, split_metrics = trained(batches, 1, table)
        assert split.tobytes() == whole.tobytes()
        assert split_metrics == pytest.approx(metrics, rel=1e-5)


def test_the_table_has_a_row_per_slot():
    table = loss_table({1: LossSpec(0.1, 0.2, 3.0, 1.1, "cross_entropy")}, 3)
    settings = ("clip_low", "clip_high", "tis_cap", "sequence_mask_c")
    assert {k: v.dtype for k, v in table.items()} == {"kind": np.dtype(np.int32), **dict.fromkeys(settings, np.dtype(np.float32))}
    assert [table[k][1].item() for k in settings] == pytest.approx([0.1, 0.2, 3.0, 1.1])
    assert [table[k][0].item() for k in settings] == pytest.approx(list(dataclasses.astuple(LossSpec()))[:4])
    assert table["kind"].tolist() == [0, 1, 0]
