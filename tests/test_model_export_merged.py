"""Merged folders without transformers: the sum of base and delta, read back by `load_base`. (test_model_export_peft.py asks transformers.)"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from export_builders import FAMILIES, a_base, a_config, lora_of, random_adapter
from learner_builders import same_bytes
from llama_file import write_llama

from noria.errors import AdapterFormatError, StateConflictError
from noria.model.export import write_merged
from noria.model.lora import HEAD, MODULES, zero_adapter
from noria.model.transformer import forward_logits
from noria.model.weights import load_base, load_gguf
from noria.text.chat import ChatFormat

IDS = np.arange(40, dtype=np.int32)


def merged(folder, base, adapter, lora, **how):
    write_merged(folder, base, adapter, lora, **how)
    return load_base(str(folder))


def same_tokenizer(one, other):
    texts = ("", "plain text", " <s>2 special</s>", "naïve 漢字 🙂", "hello hello")
    facts = [(t.vocab_size, t.bos_id, t.eos_id, t.end_ids, [t.encode(text) for text in texts]) for t in (one, other)]
    return facts[0] == facts[1]


def same_model(config, other):
    return dataclasses.replace(config, name="") == dataclasses.replace(other, name="")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_folder_is_the_base_with_every_delta_added(tmp_path, family):
    base, lora = a_base(FAMILIES[family]), lora_of("all", 4, 8.0, use_rslora=True)
    adapter = random_adapter(base.config, lora, max_rank=16)
    found = merged(tmp_path / "x", base, adapter, lora)
    assert same_model(found.config, base.config)
    assert same_tokenizer(found.tokenizer, base.tokenizer)
    for name, weight in base.params["layers"].items():
        a, b = (adapter[side].get(name) for side in "ab")
        expected = weight + 4.0 * np.einsum("lir,lro->lio", a.astype(np.float64), b.astype(np.float64)) if name in MODULES else weight
        np.testing.assert_allclose(found.params["layers"][name], expected, rtol=0, atol=2e-6)
    assert all(same_bytes(found.params[name], base.params[name]) for name in base.config.top_shapes)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_zeros_gives_the_base_bit_for_bit(tmp_path, family):
    """Case 109: what is exported without an adapter has no adapter in it; and merging leaves the base as it was."""
    base, before = a_base(FAMILIES[family]), a_base(FAMILIES[family]).params
    write_merged(tmp_path / "other", base, random_adapter(base.config, lora_of("all")), lora_of("all"))
    assert same_bytes(merged(tmp_path / "x", base, zero_adapter(base.config, 4), lora_of("all")).params, before)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_an_adapted_unembedding_is_a_matrix_of_its_own(tmp_path, family):
    base, lora = a_base(FAMILIES[family]), lora_of(HEAD)
    adapter = random_adapter(base.config, lora, head=True)
    found = merged(tmp_path / "x", base, adapter, lora)
    assert not found.config.tie_embeddings
    np.testing.assert_array_equal(found.params["embed"], base.params["embed"])
    delta = 2.0 * adapter["a"][HEAD][0].astype(np.float64) @ adapter["b"][HEAD][0]
    np.testing.assert_allclose(found.params["head"], base.params.get("head", base.params["embed"]) + delta.T, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shard_bytes", [1, 10_000, 40_000])
def test_shards_are_no_larger_than_asked_and_hold_the_same_model(tmp_path, shard_bytes):
    base, lora = a_base(a_config()), lora_of("all")
    adapter = random_adapter(base.config, lora)
    whole = merged(tmp_path / "whole", base, adapter, lora)
    assert [path.name for path in (tmp_path / "whole").glob("model*")] == ["model.safetensors"]
    assert same_bytes(merged(tmp_path / "x", base, adapter, lora, shard_bytes=shard_bytes).params, whole.params)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    files = {path.name: path.stat().st_size for path in (tmp_path / "x").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == 4 * base.config.num_parameters
    largest = 4 * base.config.vocab_size * base.config.hidden_size
    assert max(files.values()) <= max(shard_bytes, largest) + 4096
    assert not list((tmp_path / "x").glob("*.part"))


def test_bfloat16_halves_the_file_and_loses_a_small_update(tmp_path):
    """Case 49: a delta of 2^-10 of its weights is rounded away; float32, and the adapter beside the base, keep it."""
    config, lora = a_config(), lora_of("all", 1, 1.0)
    base = a_base(config)
    rounded = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16).astype(np.float32), base.params)
    base = dataclasses.replace(base, params=rounded)
    adapter = zero_adapter(config, 1)
    adapter["a"]["up"][:, 0] = 1.0
    adapter["b"]["up"][...] = (rounded["layers"]["up"][:, :1] * 2.0**-10).astype(np.float32)
    small = merged(tmp_path / "small", base, adapter, lora, dtype="bfloat16")
    exact = merged(tmp_path / "exact", base, adapter, lora)
    assert same_bytes(small.params, rounded)
    assert (exact.params["layers"]["up"][:, 0] != rounded["layers"]["up"][:, 0]).all()
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == "bfloat16"
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "exact")]
    assert 0.5 <= sizes[0] / sizes[1] < 0.52
    assert np.abs(forward_logits(rounded, config, IDS, adapter, lora.scale) - forward_logits(rounded, config, IDS)).max() > 1e-5


def test_the_tokenizer_files_of_the_bases_folder_come_along(tmp_path):
    first = a_base(a_config())
    first = dataclasses.replace(first, chat=ChatFormat("{{ messages[0].content }}<s>", first.tokenizer))
    base = merged(tmp_path / "base", first, zero_adapter(first.config, 1), lora_of("all", 1))
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [257, 10], "temperature": 0.6}')
    (tmp_path / "base" / "README.md").write_text("of the base")
    base = load_base(str(tmp_path / "base"))
    found = merged(tmp_path / "x", base, random_adapter(base.config, lora_of("all")), lora_of("all"))
    assert found.tokenizer.end_ids == (257, 10)
    assert found.chat.template == first.chat.template
    names = {path.name for path in (tmp_path / "base").iterdir()} - {"README.md"}
    assert {path.name for path in (tmp_path / "x").iterdir()} == names
    unchanged = names - {"config.json", "model.safetensors"}
    assert all((tmp_path / "x" / name).read_bytes() == (tmp_path / "base" / name).read_bytes() for name in unchanged)


def test_a_base_from_a_gguf_file_becomes_a_folder_with_its_tokenizer(tmp_path):
    base = load_gguf(write_llama(tmp_path / "base.gguf"), "small")
    found = merged(tmp_path / "x", base, zero_adapter(base.config, 1), lora_of("all", 1))
    assert same_bytes(found.params, base.params)
    assert same_model(found.config, base.config)
    assert same_tokenizer(found.tokenizer, base.tokenizer)


UNWRITABLE = {
    "a tokenizer of no known format": (lambda: load_base("tiny"), r"tokenizer of base tiny.*export the adapter as PEFT"),
    "frequencies of no known setting": (lambda: of_llama(rope=dataclasses.replace(a_config().rope, settings=None)), "rotary frequencies"),
    "biases that its family has not": (lambda: of_llama(qkv_bias=True), "q, k, v biases: True, an o bias: False"),
}


def of_llama(**changes):
    return a_base(dataclasses.replace(a_config(), **changes))


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_the_format_cannot_say_is_refused_and_nothing_is_written(tmp_path, case):
    make, reason = UNWRITABLE[case]
    base = make()
    with pytest.raises(AdapterFormatError, match=reason):
        write_merged(tmp_path / "x", base, zero_adapter(base.config, 4), lora_of("all"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_not_merged_into(tmp_path):
    base = a_base(a_config())
    (tmp_path / "mine").write_text("")
    with pytest.raises(StateConflictError, match="not an empty folder"):
        write_merged(tmp_path, base, zero_adapter(base.config, 4), lora_of("all"))
