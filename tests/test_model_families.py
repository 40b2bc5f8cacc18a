"""Every family: logits and angles of transformers, GGUF and safetensors of one model, learner and sampler on it. Case 51."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_models import CASES, LLAMA3, NUM_IDS, ORIGINAL, YARN, fields, new, old, random_state, write_family_gguf, write_folder
from learner_builders import drain, spec
from sampler_builders import NoSpans, prompt, request, run

from noria.clock import RealClock
from noria.config import LearnerConfig, SamplerConfig
from noria.learner.learner import Learner
from noria.learner.optimizer import empty_state, load_slot
from noria.learner.step import Model, pull, score, to_device
from noria.model import gguf_model, hf_folder, lora
from noria.model.config import ModelConfig
from noria.model.gguf_file import read_gguf
from noria.model.params import Params
from noria.model.placement import place
from noria.model.transformer import forward_logits, rotary_angles
from noria.observe import SpanRecorder
from noria.rl.losses import TokenCotangents
from noria.rl.packing import MicrobatchPlan, PlannedPiece, microbatch_shape, pack
from noria.sampler.engine import SamplerEngine
from noria.sampler.runner import Shapes
from noria.types import Entries, Piece

POSITIONS = np.array([0, 1, 100, 8000])
REAL_ROPE = {
    "llama-3.1": fields("LlamaForCausalLM", head_dim=128, max_position_embeddings=131072, **old(500_000.0, LLAMA3 | {ORIGINAL: 8192})),
    "llama-3.2": fields(
        "LlamaForCausalLM", head_dim=64, max_position_embeddings=131072, **new("llama3", 5e5, **LLAMA3 | {"factor": 32.0, ORIGINAL: 8192})
    ),
    "qwen2.5-yarn": fields("Qwen2ForCausalLM", head_dim=128, max_position_embeddings=131072, **old(1e6, YARN | {ORIGINAL: 32768})),
    "qwen3-real": fields("Qwen3ForCausalLM", head_dim=128, max_position_embeddings=40960, **new("default", 1e6)),
    "mscale": fields(
        "LlamaForCausalLM", head_dim=64, max_position_embeddings=16384, **new("yarn", **YARN | {ORIGINAL: 4096}, mscale=1.0, mscale_all_dim=0.7)
    ),
}
IDS = np.random.default_rng(7).integers(0, 264, NUM_IDS).astype(np.int32)


def loaded(folder: Path) -> tuple[ModelConfig, Params]:
    config = hf_folder.read_config(folder, folder.name)
    return config, hf_folder.read_params(folder, config)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, run_reference: Any) -> Path:
    """Folders of every case, each with what transformers makes of it."""
    folder = tmp_path_factory.mktemp("families")
    np.save(folder / "positions.npy", POSITIONS)
    for name, config in CASES.items():
        np.save(write_folder(folder / name, config) / "ids.npy", IDS)
    for name, config in REAL_ROPE.items():
        write_folder(folder / name, config, {})
        (folder / name / "model.safetensors").unlink()
    run_reference("family_logits.py", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_past_the_original_context_are_those_of_transformers(name: str, reference: Path) -> None:
    expected = np.load(reference / name / "logits.npy")
    config, params = loaded(reference / name)
    logits = np.asarray(forward_logits(params, config, IDS))
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *REAL_ROPE])
def test_angles_are_those_of_transformers(name: str, reference: Path) -> None:
    config, expected = hf_folder.read_config(reference / name, name), np.load(reference / name / "angles.npz")
    angles = rotary_angles(config, jnp.asarray(POSITIONS)[None])
    for ours, theirs in zip(angles, (expected["cos"], expected["sin"]), strict=True):
        halves = np.split(theirs, 2, axis=-1)
        np.testing.assert_array_equal(*halves)
        np.testing.assert_allclose(ours[0, :3, 0], halves[0][:3], atol=1e-5)  # a float32 angle of 100 has steps of 8e-6
        np.testing.assert_allclose(ours[0, 3, 0], halves[0][3], atol=1e-3)  # of 8,000, steps of 5e-4


@pytest.mark.parametrize("name", [name for name in CASES if name != "llama-yarn-tuned"])
def test_gguf_and_safetensors_of_one_model_agree(name: str, tmp_path: Path) -> None:
    state = random_state(CASES[name])
    config, params = loaded(write_folder(tmp_path / name, CASES[name], state))
    file = read_gguf(write_family_gguf(tmp_path / "model.gguf", CASES[name], state))
    gguf_config = gguf_model.read_config(file, name)
    assert gguf_config.layer_shapes == config.layer_shapes
    assert gguf_config.top_shapes == config.top_shapes
    np.testing.assert_allclose(gguf_config.rope.inverse_frequencies, config.rope.inverse_frequencies, rtol=1e-6)
    assert gguf_config.rope.attention_factor == pytest.approx(config.rope.attention_factor, rel=1e-12)
    assert jax.tree.all(jax.tree.map(np.array_equal, gguf_model.read_params(file, gguf_config), params))
    assert gguf_config.rms_norm_eps == pytest.approx(config.rms_norm_eps, rel=1e-6)
    if name in ("llama-tied-llama3", "qwen3-bias"):  # in all others nothing is left that could differ
        logits, other = (np.asarray(forward_logits(params, one, IDS)) for one in (config, gguf_config))
        assert np.abs(other - logits).max() <= 1e-4 * np.abs(logits).max()


@pytest.mark.parametrize(("one", "other"), [("llama-tied-llama3", "llama-llama3-old"), ("llama-linear", "llama-linear-old")])
def test_both_spellings_of_rope_settings_mean_the_same(one: str, other: str, tmp_path: Path) -> None:
    ropes = [hf_folder.read_config(write_folder(tmp_path / name, CASES[name], {}), name).rope for name in (one, other)]
    assert ropes[0] == ropes[1]
    assert ropes[0].settings == ropes[1].settings


@pytest.fixture(scope="module", params=[pytest.param("qwen2", marks=pytest.mark.slow), "qwen3-bias"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model with biases, and one with biases and head norms, in the stages' own forms."""
    config, params = loaded(write_folder(tmp_path_factory.mktemp(request.param), CASES[request.param]))
    return SimpleNamespace(config=config, params=params, placed=place(params), adapter=random_adapter(config, seed=3))


def random_adapter(config: ModelConfig, seed: int) -> lora.HostAdapter:
    """Rank 4 in a class of 8, every module trained."""
    adapter = lora.initial_adapter(config, spec("run").lora, 8, seed)
    rng = np.random.default_rng(seed)
    for leaf in adapter["b"].values():
        leaf[:, :4] = rng.normal(size=leaf[:, :4].shape) * 0.1
    return adapter


def logprobs_of(model: SimpleNamespace, ids: tuple[int, ...]) -> np.ndarray:
    """log p(ids[1:]) by the plain forward pass."""
    logits = forward_logits(model.params, model.config, np.array(ids, np.int32), model.adapter, spec("run").lora.scale)
    return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(ids) - 1), ids[1:]]


def test_the_learner_scores_what_the_forward_pass_gives(model: SimpleNamespace) -> None:
    clock = RealClock()
    settings = LearnerConfig(max_positions=256, num_slots=4, rank_classes=(8,))
    learner = Learner(model.placed.stacked, model.config, settings, spans=SpanRecorder(clock), clock=clock, wake=lambda: None, max_stall_s=60.0)
    state = lora.initial_state(model.config, spec("run").lora, 8, 0)._replace(params=model.adapter)
    learner.load_run(spec("run"), state)
    ids = tuple(int(i) for i in IDS[:150])
    scored = learner.score_ids("run", ids)
    drain(learner)
    np.testing.assert_allclose(scored.result(0), logprobs_of(model, ids), atol=1e-4)


def test_the_learners_gradient_is_that_of_the_forward_pass(model: SimpleNamespace) -> None:
    """Of a random combination of log-probabilities, with respect to the adapter, whose deltas pass through biases and head norms."""
    ids_T, cotangent_M = IDS[:128], np.zeros(128, np.float32)
    cotangent_M[:127] = np.random.default_rng(0).normal(size=127)
    ones, ints = np.ones(127, np.float32), np.zeros(127, np.int32)
    entries = Entries(np.arange(127, dtype=np.int32), ids_T[1:], ones, -ones, ones, ones, ints, ints)
    piece = Piece(ids_T, np.arange(128, dtype=np.int32), np.full(128, 128, np.int32), entries)
    arrays = to_device(pack(MicrobatchPlan(microbatch_shape(128), (PlannedPiece("run", 1, 0, piece),))))
    state = lora.AdapterState(model.adapter, *(jax.tree.map(np.zeros_like, model.adapter) for _ in range(2)), num_steps=0)
    slots, scale = load_slot(empty_state(model.config, 3, 8), 1, state), spec("run").lora.scale
    scale_A, stacked = jnp.zeros(3).at[1].set(scale), model.placed.stacked
    _, residuals = score(Model(stacked, slots.params, scale_A), arrays, model.config)
    zeros_M = jnp.zeros_like(arrays.entries.temperature_M)
    padded = TokenCotangents(zeros_M.at[:128].set(cotangent_M), zeros_M, zeros_M)
    got = pull(Model(stacked, slots.params, scale_A), arrays, residuals, padded, slots.gradient, config=model.config)

    def combined(adapter: lora.HostAdapter) -> jax.Array:
        logprobs = jax.nn.log_softmax(forward_logits(stacked, model.config, ids_T, adapter, scale))
        return (logprobs[jnp.arange(127), ids_T[1:]] * cotangent_M[:127]).sum()

    expected = jax.jit(jax.grad(combined))(jax.tree.map(jnp.asarray, model.adapter))
    for ours, naive in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(naive) > 0
        assert np.linalg.norm(ours[:, 1] - naive) <= 1e-5 * np.linalg.norm(naive)


def test_the_sampler_decodes_what_the_forward_pass_gives(model: SimpleNamespace) -> None:
    settings = SamplerConfig(num_lanes=16, num_pages=256, max_context=256, steps_per_dispatch=4, num_slots=8)
    sampler = SamplerEngine(model.placed, model.config, settings, rank_classes=(8,), eos_id=263, spans=NoSpans(), shapes=Shapes((16,), (4,)))
    sampler.publish("r", 0, model.adapter, spec("run").lora.scale)
    prompt_ids = prompt(100)
    (completion,) = run(sampler, request(prompt_ids, run="r", max_tokens=24, temperature=0.0))
    ids = prompt_ids + completion.sampled_ids
    first = len(prompt_ids) - 1
    np.testing.assert_allclose(completion.behavior_logprobs, logprobs_of(model, ids)[first:], atol=1e-4)
    logits = np.asarray(forward_logits(model.params, model.config, np.array(ids, np.int32), model.adapter, spec("run").lora.scale))
    assert tuple(logits[first:-1].argmax(-1)) == completion.sampled_ids


def test_an_adapter_in_the_plain_forward_pass_is_a_change_of_weights(model: SimpleNamespace) -> None:
    """Every module, the unembedding too: logits with the adapter are logits of the weights it is merged into."""
    rng, scale = np.random.default_rng(5), 0.5
    head = {"a": rng.normal(size=(1, 64, 4)).astype(np.float32), "b": 0.1 * rng.normal(size=(1, 4, 264)).astype(np.float32)}
    adapter = {side: model.adapter[side] | {"head": head[side]} for side in ("a", "b")}
    layers = {m: w + scale * adapter["a"][m] @ adapter["b"][m] if m in adapter["a"] else w for m, w in model.params["layers"].items()}
    merged = model.params | {"layers": layers, "head": model.params["head"] + scale * (head["a"] @ head["b"])[0].T}
    got = np.asarray(forward_logits(model.params, model.config, IDS, adapter, scale))
    expected = np.asarray(forward_logits(merged, model.config, IDS))
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(expected - np.asarray(forward_logits(model.params, model.config, IDS))).max() > 0.1
