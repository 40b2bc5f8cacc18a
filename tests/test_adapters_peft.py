"""Cases 102, 104 and 105: an adapter means to PEFT what it means to the learner and to the sampler; one scale on every side, float32."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from export_builders import write_base
from learner_builders import drain, make_learner, nonzero_state, spec, tiny
from sampler_builders import NoSpans, config, request, run

from noria.model.export import write_peft
from noria.model.lora import MODULES, delta
from noria.model.peft_config import place_path, places
from noria.model.weights import load_base
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes

MAX_RANK = 64
CASES = [(rank, alpha) for rank in (4, 8, 64) for alpha in (8, 32)]
PROMPT = tuple(int(i) for i in np.random.default_rng(0).integers(0, 250, 40))


def name_of(rank, alpha):
    return f"r{rank}a{alpha}"


def names():
    """(module, layer, Hugging Face's name) of everything that an adapter of all modules adapts."""
    return [(*place, place_path(place)) for place in places(MODULES, tiny()[0])]


def sampled_with(states):
    """Greedy completions of one prompt, by every adapter at once."""
    model, base = tiny()
    sampler = SamplerEngine(base, model, config(), rank_classes=(MAX_RANK,), eos_id=2, spans=NoSpans(), shapes=Shapes(lanes=(16,), rows=(4,)))
    for (rank, alpha), state in states.items():
        sampler.publish(name_of(rank, alpha), 0, state.params, spec("run", rank=rank, alpha=alpha).lora.scale)
    completions = run(sampler, *(request(PROMPT, run=name_of(*case), max_tokens=12, temperature=0.0) for case in CASES))
    return dict(zip(CASES, completions, strict=True))


@pytest.fixture(scope="module")
def world(tmp_path_factory, run_reference):
    """Every case's state and what the sampler made of it, in folders with what PEFT made of it."""
    folder = tmp_path_factory.mktemp("peft")
    states = {case: nonzero_state(seed, spec("run", rank=case[0], alpha=case[1]), MAX_RANK) for seed, case in enumerate(CASES)}
    completions = sampled_with(states)
    base = folder / "bases" / "tiny"
    write_base(base / "model", load_base("tiny"))
    for (rank, alpha), state in states.items():
        case, path = (rank, alpha), base / "adapters" / name_of(rank, alpha)
        write_peft(path, state.params, spec("run", rank=rank, alpha=alpha).lora, tiny()[0], base_name="tiny")
        np.save(path / "ids.npy", np.array(PROMPT + completions[case].sampled_ids, np.int32))
    run_reference("peft_logits.py", folder)
    return SimpleNamespace(folder=base / "adapters", states=states, completions=completions)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "alpha"), CASES)
def test_deltas_are_pefts(world, rank, alpha):
    expected = np.load(world.folder / name_of(rank, alpha) / "deltas.npz")
    assert set(expected) == {theirs for _, _, theirs in names()}
    params = world.states[rank, alpha].params
    scale = spec("run", rank=rank, alpha=alpha).lora.scale
    for module, layer, theirs in names():
        a, b = params["a"][module][layer], params["b"][module][layer]
        ours = delta(jnp.eye(len(a))[None], a[None], b[None], jnp.full(1, scale))[0]
        assert np.abs(ours - expected[theirs].T).max() <= 1e-6 * np.abs(expected[theirs]).max()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "alpha"), CASES)
def test_learner_and_sampler_give_pefts_logprobs(world, rank, alpha):
    """Both with their own scale: the learner's from its run's spec, the sampler's as published."""
    path, completion = world.folder / name_of(rank, alpha), world.completions[rank, alpha]
    ids, logits = PROMPT + completion.sampled_ids, np.load(path / "logits.npy")
    logprobs = np.asarray(jax.nn.log_softmax(logits, -1))[np.arange(len(ids) - 1), ids[1:]]
    learner = make_learner(max_rank=MAX_RANK)
    learner.load_run(spec("run", rank=rank, alpha=alpha), world.states[rank, alpha])
    learned = learner.score_ids("run", ids)
    drain(learner)
    first = len(PROMPT) - 1
    np.testing.assert_allclose(learned.result(0), logprobs, atol=1e-4)
    np.testing.assert_allclose(completion.behavior_logprobs, logprobs[first:], atol=1e-4)
    assert (logits[first:-1].argmax(-1) == completion.sampled_ids).all()
    base_logprobs = np.asarray(jax.nn.log_softmax(np.load(path / "base_logits.npy"), -1))[np.arange(len(ids) - 1), ids[1:]]
    assert np.abs(base_logprobs - logprobs).max() > 1e-2, "an adapter that PEFT left out would show"
