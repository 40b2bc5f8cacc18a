"""From the learner's slot to the sampler's: rate 0 changes no bit, the smallest rate is not lost, and hundreds of publishes leave nothing behind."""

import dataclasses
import gc
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import drain, make_learner, nonzero_state, pieces_of, random_groups, same_bytes, spec, tiny
from sampler_builders import config, prompt, request, run

from noria.adapters.versions import VersionFiles
from noria.clock import RealClock
from noria.config import LearnerConfig
from noria.learner.learner import Learner
from noria.learner.operations import RunSpec
from noria.model.lora import checksum, initial_state
from noria.model.placement import place
from noria.model.weights import load_base
from noria.observe import SpanRecorder
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.types import LoraSpec, LossSpec, OptimizerSpec

MAX_RANK = 8


def sampler_of(spans, base=None, **changes):
    model, placed = tiny()
    return SamplerEngine(base or placed, model, config(**changes), rank_classes=(MAX_RANK,), eos_id=2, spans=spans, shapes=Shapes((16,), (4,)))


def publish(sampler, run_spec, version, state):
    sampler.publish(run_spec.run_id, version, state.params, run_spec.lora.scale)


def requests():
    return [request(prompt(20 + n, seed=n), run="run", max_tokens=16, seed=n) for n in range(4)]


def scored(learner, asked, completion):
    """The learner's log-probabilities of a completion."""
    future = learner.score_ids("run", asked.prompt_ids + completion.sampled_ids)
    drain(learner)
    return future.result(0)[len(asked.prompt_ids) - 1 :]


def test_five_publishes_at_learning_rate_zero_change_no_bit_of_what_is_sampled():
    """Case 65: what changes samples at rate 0 is the way from learner to sampler, not a gradient."""
    run_spec = dataclasses.replace(spec("run"), optimizer=OptimizerSpec(0.0, weight_decay=0.5, warmup_steps=2))
    learner, state = make_learner(), nonzero_state(7, run_spec)
    sampler = sampler_of(learner._passes._spans)
    learner.load_run(run_spec, state)
    publish(sampler, run_spec, 0, state)
    first = run(sampler, *requests())
    expected = [scored(learner, asked, completion) for asked, completion in zip(requests(), first, strict=True)]
    for version in range(1, 6):
        future = learner.train("run", pieces_of(random_groups(version)))
        drain(learner)
        trained = future.result(0)
        assert trained.grad_norm > 0
        assert same_bytes(trained.state.params, state.params)
        assert not same_bytes(trained.state.first_moment, state.first_moment), "it did train"
        publish(sampler, run_spec, version, trained.state)
        for asked, before, now, learned in zip(requests(), first, run(sampler, *requests()), expected, strict=True):
            assert set(now.versions) == {version}
            assert (now.sampled_ids, now.behavior_logprobs) == (before.sampled_ids, before.behavior_logprobs)
            assert (scored(learner, asked, now) == learned).all()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)])
def test_two_hundred_steps_at_the_smallest_rate_reach_the_sampler(dtype, tolerance):
    """Case 49: each step moves a weight by less than the grid of bfloat16 there; whatever the base's dtype, none is lost on any side."""
    run_spec = RunSpec("run", LoraSpec(4, 8.0), OptimizerSpec(1e-6), LossSpec(sequence_mask_c=0.0))
    base, clock = place(load_base("tiny").params, dtype), RealClock()
    settings = LearnerConfig(max_positions=256, num_slots=4, rank_classes=(MAX_RANK,))
    spans = SpanRecorder(clock)
    learner = Learner(base.stacked, tiny()[0], settings, spans=spans, clock=clock, wake=lambda: None, max_stall_s=60.0)
    start = initial_state(tiny()[0], LoraSpec(4, 8.0), MAX_RANK, seed=7)
    learner.load_run(run_spec, start)
    batch = pieces_of(random_groups(1))
    for _ in range(200):
        future = learner.train("run", batch)
        drain(learner)
    state = future.result(0).state
    assert state.num_steps == 200
    assert {leaf.dtype for tree in state[:3] for leaf in jax.tree.leaves(tree)} == {np.dtype(np.float32)}
    for side, axis in (("a", 2), ("b", 1)):
        for module in state.params[side]:
            parts = [np.take(tree[side][module], range(4), axis) for tree in (start.params, *state[:3])]
            assert all((part != 0).mean() > 0.99 for part in parts[2:]), "moments"
            moved = np.abs(parts[1] - parts[0])
            assert (moved > 0).mean() > 0.99
            assert moved.max() < 1.1 * 200 * 1e-6
            if side == "a":
                is_lost = jnp.asarray(parts[0]).astype(jnp.bfloat16) == (jnp.asarray(parts[0]) + 1e-6).astype(jnp.bfloat16)
                assert is_lost.mean() > 0.9, "one such step would round to nothing in bfloat16"
    sampler = sampler_of(spans, base)
    publish(sampler, run_spec, 200, state)
    assert sampler.checksum("run", 200) == checksum(state.params)
    asked = requests()
    plain = [request(one.prompt_ids, max_tokens=16, seed=one.params.seed) for one in asked]
    changes = []
    for one, completion, without in zip(asked, run(sampler, *asked), run(sampler, *plain), strict=True):
        assert np.abs(scored(learner, one, completion) - completion.behavior_logprobs).mean() < tolerance
        assert completion.sampled_ids[0] == without.sampled_ids[0]
        changes.append(abs(completion.behavior_logprobs[0] - without.behavior_logprobs[0]))
    assert max(changes) > 1e-4, "the adapter shows in what is sampled"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc")
@pytest.mark.parametrize("num_steps", [300, pytest.param(1000, marks=pytest.mark.prove)])
def test_hundreds_of_steps_with_their_files_and_publishes_leave_memory_descriptors_and_slots_flat(tmp_path, num_steps):
    """Case 99: from the 100th to the last."""
    run_spec, files = spec("run", learning_rate=1e-3), VersionFiles(tmp_path)
    learner, state = make_learner(), nonzero_state(7, run_spec)
    sampler = sampler_of(learner._passes._spans, num_slots=3, host_mib=1)  # full of waiting pages long before the 100th step
    learner.load_run(run_spec, files.load(files.write("run", 0, state, 4), MAX_RANK))
    publish(sampler, run_spec, 0, state)
    batch = pieces_of(random_groups(1, num_groups=1))
    seen = []
    for version in range(1, num_steps + 1):
        future = learner.train("run", batch)
        drain(learner)
        state = future.result(0).state
        record = files.write("run", version, state, 4)
        files.keep_only("run", (version - 1, version))
        publish(sampler, run_spec, version, state)
        assert sampler.checksum("run", version) == record.checksum
        run(sampler, request(prompt(20), run="run", episode=f"e{version}", max_tokens=4, seed=version))
        if version % 100 == 0:
            del future
            seen.append(footprint(sampler, learner))
    settled, last = seen[0], seen[-1]
    assert last[1:] == settled[1:], "file descriptors, device arrays, free slots, held pages, programs"
    assert last[0] - settled[0] < 8, "resident MiB"
    assert len(list((tmp_path / "run").iterdir())) == 2


def footprint(sampler, learner):
    gc.collect()
    resident_mib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    arrays = len(jax.live_arrays())
    return resident_mib, len(os.listdir("/proc/self/fd")), arrays, sampler.num_free_slots, sampler.num_held_pages, sampler.num_programs
