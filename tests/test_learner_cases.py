"""Known ways in which other trainers broke, one by one, on the whole learner: temperatures, lengths at their limits, floods, pages, publishes."""

import dataclasses
import gc
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from learner_builders import ALGORITHM, drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, state_of, tiny
from sampler_builders import NoSpans, config, prompt, request, run

from noria.adapters.versions import VersionFiles
from noria.errors import InvalidRequestError, TreeTooLargeError
from noria.rl.tree import build_tree
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.types import Completion, Episode, EpisodeGroup, LossSpec, OptimizerSpec, Task, Turn

RANK = 8
KEEP_ALL = ALGORITHM.model_copy(update={"zero_signal": "train", "truncated": "keep"})


def sampler():
    model, placed = tiny()
    return SamplerEngine(placed, model, config(num_slots=3), rank_classes=(RANK,), eos_id=2, spans=NoSpans(), shapes=Shapes((16,), (4,)))


# ---- sampled and learned ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"max_positions": 1024}, {"max_positions": 128, "path_positions": 512}], ids=["packed", "walked"])
def test_at_temperature_0_6_the_learner_says_what_the_sampler_said(settings):
    """Case 19: and without the temperature it would say something else."""
    learner, run_spec = make_learner(**settings), spec("run")
    state = nonzero_state(7, run_spec)
    learner.load_run(run_spec, state)
    engine = sampler()
    engine.publish("run", 0, state.params, run_spec.lora.scale)
    asked = [request(prompt(150, seed=n // 4), run="run", max_tokens=40, temperature=0.6, seed=n) for n in range(12)]
    turns = [Turn(one.prompt_ids, completion, 0.6) for one, completion in zip(asked, run(engine, *asked), strict=True)]
    episodes = [Episode(str(n), n % 4, (turn,), float(n % 2)) for n, turn in enumerate(turns)]
    groups = [EpisodeGroup(str(g), "run", Task(g, 0), tuple(episodes[4 * g : 4 * g + 4])) for g in range(3)]
    tree, _ = build_tree(groups, KEEP_ALL)
    at_one = dataclasses.replace(tree, entries=dataclasses.replace(tree.entries, temperature_M=np.ones_like(tree.entries.temperature_M)))
    assert len(tree.entries) > 100
    results = []
    for each in (tree, at_one):
        batch = learner.planner.plan(each)
        assert (batch.walk is not None) == ("path_positions" in settings)
        future = learner.forward("run", batch, LossSpec(kind="importance_sampling"))
        drain(learner)
        results.append(future.result(0))
    errors = [np.abs(r.outputs.learner_logprobs_M - tree.entries.behavior_logprobs_M).mean() for r in results]
    assert errors[0] < 1e-4
    assert abs(results[0].metrics["ratio_mean"] - 1) < 1e-3
    assert errors[1] > 1e-2


# ---- lengths at their limits --------------------------------------------------------------------------------------------------------------


def group_of(*episodes):
    """episodes: (length of the prompt, sampled ids, whether it was cut)."""
    made = [
        Episode(str(m), m, (Turn(prompt(length), Completion(ids, (-5.0,) * len(ids), (0,) * len(ids), "stop"), 1.0),), float(m == 0), truncated=cut)
        for m, (length, ids, cut) in enumerate(episodes)
    ]
    return [EpisodeGroup("g", "run", Task(0, 0), tuple(made))]


def trained(groups, algorithm=ALGORITHM, loss=None, **settings):
    """(result, statistics) of one step; the state it leaves is finite."""
    tree, statistics = build_tree(groups, algorithm)
    learner = make_learner(**{"max_positions": 128, **settings})
    learner.load_run(spec("run"), nonzero_state(1, spec("run")))
    future = learner.train("run", tree, loss=loss)
    drain(learner)
    step = future.result(0)
    assert np.isfinite([step.grad_norm, *step.metrics.values()]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step.state))
    return step, statistics


KINDS = (LossSpec(), LossSpec(kind="gspo"), LossSpec(kind="ppo", m2_cap=0.04), LossSpec(kind="cross_entropy"))


@pytest.mark.parametrize("loss", KINDS, ids=lambda loss: loss.kind)
def test_a_prompt_as_long_as_a_microbatch_trains_what_was_sampled_behind_it(loss):
    """Case 44: the one sampled token stands on no position of its own."""
    step, _ = trained(group_of((128, (7,), False), (128, (8,), False)), loss=loss)
    assert (step.num_entries, step.num_positions) == (2, 128)


def test_a_prompt_longer_than_a_microbatch_is_refused_by_name_or_walked():
    """Case 44."""
    groups = group_of((129, (7,), False), (129, (8, 9), False))
    with pytest.raises(TreeTooLargeError, match=r"set learner\.path_positions"):
        trained(groups)
    step, _ = trained(groups, path_positions=512)
    assert step.num_entries == 3
    assert step.grad_norm > 0
    with pytest.raises(TreeTooLargeError, match=r"raise learner\.path_positions"):
        trained(group_of((600, (7,), False), (600, (8, 9), False)), path_positions=512)


@pytest.mark.parametrize("loss", KINDS, ids=lambda loss: loss.kind)
def test_rows_without_a_response_are_counted_and_the_others_train(loss):
    """Case 44."""
    step, statistics = trained(group_of((20, (7, 8), False), (20, (), False), (20, (9,), True), (20, (5,), False)), loss=loss)
    assert (statistics.num_empty, statistics.num_truncated, statistics.num_trained) == (1, 1, 2)
    assert step.num_entries == 3


@pytest.mark.parametrize(
    "episodes",
    [[(20, (), False)] * 3, [(20, (7, 8), True), (20, (9,), True)], [(128, (), True), (300, (), True)]],
    ids=["all empty", "all cut", "no room for a response"],
)
def test_a_batch_of_nothing_but_empty_or_cut_rows_is_refused_by_name_and_leaves_the_run_as_it_was(episodes):
    """Case 44: never 0/0."""
    tree, statistics = build_tree(group_of(*episodes), ALGORITHM)
    assert statistics.num_trained == 0
    assert statistics.num_empty + statistics.num_truncated >= len(episodes)
    learner, state = make_learner(128), nonzero_state(1, spec("run"))
    learner.load_run(spec("run"), state)
    future = learner.train("run", tree)
    drain(learner)
    with pytest.raises(InvalidRequestError, match="without a single trained token"):
        future.result(0)
    assert same_bytes(state_of(learner, "run"), state)


# ---- neighbours -----------------------------------------------------------------------------------------------------------------------------

MINE = [pieces_of(random_groups(seed, num_groups=3, prompt=40), 128) for seed in (1, 2)]
THEIRS = pieces_of(random_groups(10, num_groups=3, prompt=40), 128)


def learner_with(*run_ids, **settings):
    learner = make_learner(128, **settings)
    for run_id in run_ids:
        learner.load_run(spec(run_id), nonzero_state(ord(run_id), spec(run_id)))
    drain(learner)
    return learner


def time_of(learner, future):
    """(dispatches, time on the virtual clock) until it is done: a backward pass takes as long as three forward passes."""
    steps, time = 0, 0
    while not future.done():
        before = learner.num_microbatches
        learner.step()
        steps, time = steps + 1, time + (1 if learner.num_microbatches > before else 3)
    return steps, time


def served(num_flooding, head_start):
    """B's time, sent into A's operations after so many dispatches of them."""
    learner = learner_with("a", "b")
    for _ in range(num_flooding):
        learner.forward_backward("a", MINE[0])
    for _ in range(head_start):
        learner.step()
    found = time_of(learner, learner.forward_backward("b", THEIRS))
    learner.unload_run("a")
    drain(learner)
    return found


@pytest.mark.parametrize("head_start", range(7))
def test_one_request_into_a_flood_takes_what_it_takes_in_a_fair_batch_of_equal_fullness(head_start):
    """Case 97: A has one operation on its way and one like B's to come, or 500."""
    fair, flooded = served(2 + head_start // (2 * len(MINE[0])), head_start), served(500, head_start)
    assert flooded[0] <= fair[0] + 1
    assert flooded[1] <= 1.15 * fair[1]


def test_a_step_of_one_run_leaves_the_others_state_gradient_and_clipping_alone():
    """Case 93: fb(A), fb(B) in shared passes, step(A): nothing of B's is touched, and B's own step is the one that it takes alone."""
    clipped = OptimizerSpec(1e-2, weight_decay=0.5, grad_clip_norm=1e-3)
    learner, alone = learner_with("a", "b"), learner_with("b")
    learner.forward_backward("a", MINE[0])
    for each in (learner, alone):
        each.forward_backward("b", THEIRS)
        drain(each)
    before, pending = state_of(learner, "b"), pending_of(learner, "b")
    mine = learner.optim_step("a", clipped)
    drain(learner)
    assert mine.result(0).grad_norm > 1e-3
    assert same_bytes(state_of(learner, "b"), before)
    assert same_bytes(pending_of(learner, "b"), pending)
    assert not any(leaf.any() for leaf in jax.tree.leaves(pending_of(learner, "a")))
    steps = [each.optim_step("b", clipped) for each in (learner, alone)]
    for each in (learner, alone):
        drain(each)
    assert steps[0].result(0).grad_norm == steps[1].result(0).grad_norm
    assert same_bytes(state_of(learner, "b"), state_of(alone, "b"))


def pending_of(learner, run_id):
    future = learner.pending_gradient(run_id)
    drain(learner)
    return future.result(0)


@pytest.mark.parametrize("host_mib", [0, 64])
def test_a_gradient_that_was_paged_out_between_two_batches_goes_on(tmp_path, host_mib):
    """Case 95: train A, then as many others as there are slots are scored and probed, then train A."""
    learner, alone = learner_with(*"abcde", host_mib=host_mib, spill_dir=tmp_path), learner_with("a")
    for number, batch in enumerate(MINE):
        for each in (learner, alone):
            each.forward_backward("a", batch)
        drain(learner)
        if not number:
            others = [(learner.forward(run_id, THEIRS), learner.score_ids(run_id, (1, 2, 3, 4))) for run_id in "bcde"]
            drain(learner)
            assert learner._passes.residency._runs["a"].slot is None
            for scored, probed in others:
                assert np.isfinite(scored.result(0).outputs.learner_logprobs_M).all()
                assert np.isfinite(probed.result(0)).all()
    drain(alone)
    assert same_bytes(pending_of(learner, "a"), pending_of(alone, "a"))
    for each in (learner, alone):
        each.optim_step("a")
    assert same_bytes(state_of(learner, "a"), state_of(alone, "a"))


# ---- publishes ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.prove
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc")
def test_a_thousand_publishes_leave_memory_descriptors_and_slots_flat(tmp_path):
    """Case 99: from learner to files, to sampler, and back into the learner; two states in turn, so that most of the time is what is tested."""
    run_spec, files, learner = spec("run"), VersionFiles(tmp_path), make_learner(128)
    states = [nonzero_state(seed, run_spec) for seed in (1, 2)]
    learner.load_run(run_spec, states[0])
    engine, seen = sampler(), []
    for version in range(1, 1001):
        learner.load("run", states[version % 2]._replace(num_steps=version))
        state = state_of(learner, "run")
        record = files.write("run", version, state, run_spec.lora.rank)
        files.keep_only("run", (version - 1, version))
        engine.publish("run", version, files.load(record, RANK).params, run_spec.lora.scale)
        assert engine.checksum("run", version) == record.checksum
        if version % 10 == 0:
            (completion,) = run(engine, request(prompt(20), run="run", episode=f"e{version}", max_tokens=4, seed=version))
            assert set(completion.versions) == {version}
        if version % 200 == 0:
            gc.collect()
            resident_mib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            left = len(os.listdir("/proc/self/fd")), len(jax.live_arrays()), engine.num_free_slots, engine.num_held_pages, engine.num_programs
            seen.append((resident_mib, *left))
    assert seen[-1][1:] == seen[0][1:], "file descriptors, device arrays, free slots, held pages, programs"
    assert seen[-1][0] - seen[0][0] < 8, "resident MiB"
    assert len(list((tmp_path / "run").iterdir())) == 2
