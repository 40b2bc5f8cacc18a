"""On the real base: what the sampler recorded is what the learner computes, alone and beside other tenants, and neighbours change no bit."""

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.clock import RealClock
from noria.config import AlgorithmConfig, SamplerConfig
from noria.learner.optimizer import empty_state, load_slot
from noria.learner.step import Model, loss_cotangents, loss_inputs, pull, score, to_device
from noria.model.lora import initial_state
from noria.model.placement import place
from noria.model.weights import load_base
from noria.observe import SpanRecorder
from noria.rl.losses import loss_table
from noria.rl.packing import MicrobatchPlan, PlannedPiece, cut, microbatch_shape, pack, shapes_up_to
from noria.rl.tree import build_tree
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.types import Episode, EpisodeGroup, LoraSpec, LossSpec, SampleRequest, SamplingParams, Task, Turn

RANK, SCALE = 8, 2.0
RUNS = ("amber", "birch", "cedar")
PROMPTS = {
    "amber": ("12 + 5 = 17\n31 + 24 =", "12 + 5 = 17\n8 + 9 ="),
    "birch": ("The capital of France is",),
    "cedar": ("Once upon a time", "Once more"),
}


@pytest.fixture(scope="module")
def base():
    loaded = load_base("smollm2-135m")
    return loaded, place(loaded.params)


def adapter_of(config, seed):
    """A trained-looking adapter: b is far from zero."""
    state = initial_state(config, LoraSpec(RANK, SCALE * RANK), RANK, seed)
    rng = np.random.default_rng(seed)
    for leaf in state.params["b"].values():
        leaf[:] = rng.normal(size=leaf.shape) * 0.01
    return state


def sample_groups(loaded, placed, states):
    """Three tenants sample at once; the groups as an actor would record them."""
    tokenizer = loaded.tokenizer
    settings = SamplerConfig(num_lanes=32, num_pages=256, max_context=128, num_slots=8)
    engine = SamplerEngine(
        placed, loaded.config, settings, rank_classes=(RANK,), eos_id=tokenizer.eos_id, spans=SpanRecorder(RealClock()), shapes=Shapes((32,), (4,))
    )
    for run_id, state in states.items():
        engine.publish(run_id, 0, state.params, SCALE)

    async def episode(run_id, g, prompt, member):
        params = SamplingParams(max_tokens=6, temperature=0.7 + 0.1 * member, seed=11, sample_index=member)
        ids = tokenizer.encode(prompt)
        completion = await engine.sample(SampleRequest(f"{run_id}/{g}/{member}", run_id, run_id, f"{run_id}/{g}/{member}", ids, params))
        return Episode(f"{run_id}/{g}/{member}", member, (Turn(ids, completion, params.temperature),), float(member % 2))

    async def everything():
        return {
            run_id: [
                EpisodeGroup(f"{run_id}/{g}", run_id, Task(g, 0), tuple(await asyncio.gather(*(episode(run_id, g, prompt, m) for m in range(4)))))
                for g, prompt in enumerate(PROMPTS[run_id])
            ]
            for run_id in RUNS
        }

    stop = threading.Event()

    def device():
        while not stop.is_set():
            engine.step() or stop.wait(0.001)

    thread = threading.Thread(target=device)
    thread.start()
    try:
        return asyncio.run(everything())
    finally:
        stop.set()
        thread.join()


def train(loaded, placed, states, batches, runs):
    """Score and pull one microbatch of the given runs: per run its |learner - behavior| maximum, log-probabilities and gradient."""
    config, slots = loaded.config, {run_id: RUNS.index(run_id) for run_id in RUNS}
    state = empty_state(config, len(RUNS), RANK)
    for run_id in RUNS:
        state = load_slot(state, slots[run_id], states[run_id])
    pieces = [PlannedPiece(run_id, slots[run_id], index, piece) for run_id in runs for index, piece in enumerate(batches[run_id])]
    microbatch = pack(MicrobatchPlan(microbatch_shape(512), tuple(pieces)))
    arrays, scale_A = to_device(microbatch), jnp.full(len(RUNS), SCALE)
    outputs, residuals = score(Model(placed.stacked, state.params, scale_A), arrays, config)
    table = loss_table({slot: LossSpec(sequence_mask_c=0.0) for slot in slots.values()}, len(RUNS))
    cotangent, _ = loss_cotangents(outputs, loss_inputs(microbatch), table)
    gradient = pull(Model(placed.stacked, state.params, scale_A), arrays, residuals, cotangent, state.gradient, config=config)
    found = {}
    for run_id in runs:
        mine = np.concatenate([np.arange(p.first_entry, p.first_entry + p.num_entries) for p in microbatch.placed if p.run_id == run_id])
        learner = np.asarray(outputs.learner_logprobs_M)[mine]
        error = np.abs(learner - microbatch.entries.behavior_logprobs_M[mine]).max()
        found[run_id] = error, learner, [np.asarray(leaf[:, slots[run_id]]) for leaf in jax.tree.leaves(gradient)]
    return found


@pytest.mark.slow
def test_learner_logprobs_equal_behavior_logprobs_and_neighbours_change_no_bit(base):
    loaded, placed = base
    states = {run_id: adapter_of(loaded.config, seed) for seed, run_id in enumerate(RUNS)}
    groups = sample_groups(loaded, placed, states)
    algorithm = AlgorithmConfig(steps=1, truncated="keep")
    batches = {run_id: cut(build_tree(groups[run_id], algorithm)[0], shapes_up_to(512)[-1]) for run_id in RUNS}
    beside = train(loaded, placed, states, batches, RUNS)
    for run_id in RUNS:
        alone = train(loaded, placed, states, batches, (run_id,))[run_id]
        for error, _, _ in (alone, beside[run_id]):
            assert error < 1e-4
        assert (alone[1] == beside[run_id][1]).all(), "learner_logprobs, bit for bit"
        assert all((a == b).all() for a, b in zip(alone[2], beside[run_id][2], strict=True)), "gradients, bit for bit"
        assert sum(np.abs(leaf).sum() for leaf in alone[2]) > 0
