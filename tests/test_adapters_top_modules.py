"""Adapters of the unembedding and value heads, from the learner's step through files to the sampler: trained, committed, published, resumed."""

import numpy as np
import pytest
from learner_builders import drain, make_learner, pieces_of, random_groups, same_bytes, state_of, tiny
from sampler_builders import NoSpans, config, request, run

from noria.adapters.versions import VersionFiles
from noria.learner.learner import RunSpec
from noria.model.lora import HEAD, VALUE, checksum, initial_adapter, initial_state, resident_tops
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.types import LoraSpec, LossSpec, OptimizerSpec

CLASSES = (2, 8)
LORAS = {
    "head": LoraSpec(4, 8.0, train_unembed=True),
    "narrow": LoraSpec(2, 8.0, train_unembed=True, train_value=True),
    "plain": LoraSpec(4, 8.0),
}


def a_learner(num_slots=4, **changes):
    return make_learner(num_slots=num_slots, rank_classes=CLASSES, has_unembed=True, has_values=True, **changes)


def width_of(run_id):
    return 2 if LORAS[run_id].rank == 2 else 8


def spec_of(run_id):
    return RunSpec(run_id, LORAS[run_id], OptimizerSpec(2e-2, weight_decay=0.1), LossSpec(sequence_mask_c=0.0))


def trained(learner, run_ids, num_steps=3):
    """The states of some runs after steps that they take at the same time."""
    for seed, run_id in enumerate(LORAS):
        if run_id in run_ids:
            learner.load_run(spec_of(run_id), initial_state(tiny()[0], LORAS[run_id], width_of(run_id), seed))
    for step in range(num_steps):
        futures = [learner.train(run_id, pieces_of(random_groups(10 * step + len(run_id)))) for run_id in run_ids]
        drain(learner)
        [future.result(0) for future in futures]
    return {run_id: state_of(learner, run_id) for run_id in run_ids}


@pytest.fixture(scope="module")
def world():
    learner = a_learner()
    return learner, trained(learner, list(LORAS))


def test_a_run_trains_the_top_modules_that_it_has_and_no_other(world):
    _, states = world
    for run_id, state in states.items():
        tops = [module for module in (HEAD, VALUE) if module in state.params["a"]]
        assert tops == [HEAD] * LORAS[run_id].train_unembed + [VALUE] * LORAS[run_id].train_value
        for tree in state[:3]:
            assert tree["a"].keys() == state.params["a"].keys()
    assert states["head"].params["b"][HEAD].any()
    assert states["head"].second_moment["b"][HEAD].any()
    assert not states["narrow"].params["b"][VALUE].any(), "its loss has no critic"


def test_top_modules_change_no_bit_of_what_other_modules_start_from():
    for run_id, lora in LORAS.items():
        plain = initial_adapter(tiny()[0], LoraSpec(lora.rank, lora.alpha), 8, 5)
        with_tops = initial_adapter(tiny()[0], lora, 8, 5)
        assert same_bytes(plain, {side: {m: leaf for m, leaf in with_tops[side].items() if m in plain[side]} for side in plain}), run_id


@pytest.mark.parametrize("run_id", LORAS)
def test_a_run_with_top_modules_trains_to_the_same_bytes_alone_and_on_one_slot(world, tmp_path, run_id):
    _, states = world
    assert same_bytes(trained(a_learner(), [run_id])[run_id], states[run_id])
    crowded = trained(a_learner(num_slots=1, host_mib=0, spill_dir=tmp_path), ["head", "plain"]) if run_id != "narrow" else {}
    assert all(same_bytes(state, states[name]) for name, state in crowded.items())


def test_what_is_committed_is_what_the_sampler_proves_and_samples_as_the_learner_scores(world, tmp_path):
    learner, states = world
    model, base = tiny()
    shapes = Shapes(lanes=(16,), rows=(4,), tops=resident_tops(learner._passes._settings))
    sampler = SamplerEngine(base, model, config(), rank_classes=CLASSES, eos_id=2, spans=NoSpans(), shapes=shapes)
    files, prompt = VersionFiles(tmp_path), tuple(range(30, 60))
    for run_id, state in states.items():
        record = files.write(run_id, 3, state, LORAS[run_id].rank)
        loaded = files.load(record, width_of(run_id))
        assert same_bytes(loaded, state)
        sampler.publish(run_id, 3, loaded.params, LORAS[run_id].scale)
        assert sampler.checksum(run_id, 3) == record.checksum == checksum(state.params)
    completions = run(sampler, *(request(prompt, run=run_id, max_tokens=12, seed=4) for run_id in states))
    for run_id, completion in zip(states, completions, strict=True):
        scored = learner.score_ids(run_id, prompt + completion.sampled_ids)
        drain(learner)
        np.testing.assert_allclose(scored.result(0)[len(prompt) - 1 :], completion.behavior_logprobs, atol=1e-4)
