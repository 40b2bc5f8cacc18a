"""Hugging Face folders: right numbers in the right places, shards, half precision, and every folder that cannot be served refused by name."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from family_models import CASES, fields, new, random_state, write_folder, write_tokenizer
from safetensors.numpy import save_file

from noria.errors import ConfigError, ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.model.hf_folder import INDEX, WEIGHTS, is_complete, read_config, read_params
from noria.model.params import ALIGNMENT_BYTES, Params
from noria.model.weights import load_base
from noria.types import Message

LLAMA = CASES["llama"]


def read(folder: Path) -> Params:
    return read_params(folder, read_config(folder, "model"))


def write_shards(folder: Path, state: dict[str, np.ndarray], num_shards: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    names, file_of = sorted(state), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        file_of |= dict.fromkeys(names[shard::num_shards], file)
        save_file({name: state[name] for name in names[shard::num_shards]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": file_of}))
    return folder


def test_weights_land_transposed_in_the_stacked_arrays(tmp_path: Path) -> None:
    config = CASES["qwen3-bias"]
    state = random_state(config)
    params = read(write_folder(tmp_path, config, state))
    for layer in range(2):
        at = f"model.layers.{layer}."
        for ours, theirs in {"q": "self_attn.q_proj", "o": "self_attn.o_proj", "down": "mlp.down_proj"}.items():
            np.testing.assert_array_equal(params["layers"][ours][layer], state[f"{at}{theirs}.weight"].T)
        for ours, theirs in {"k_bias": "self_attn.k_proj.bias", "o_bias": "self_attn.o_proj.bias", "q_norm": "self_attn.q_norm.weight"}.items():
            np.testing.assert_array_equal(params["layers"][ours][layer], state[at + theirs])
    np.testing.assert_array_equal(params["head"], state["lm_head.weight"])
    for array in jax.tree.leaves(params):
        assert array.ctypes.data % ALIGNMENT_BYTES == 0
        assert not array.flags.writeable


def test_a_folder_is_a_base_with_its_tokenizer_and_template(tmp_path: Path) -> None:
    write_tokenizer(write_folder(tmp_path / "small", LLAMA))
    base = load_base(str(tmp_path / "small"))
    assert (base.folder, base.config.family, base.config.vocab_size) == (tmp_path / "small", "LlamaForCausalLM", 264)
    assert base.tokenizer.decode(base.tokenizer.encode("hello")) == "hello"
    assert base.chat is not None
    assert base.chat.render([Message("user", "hi")], add_generation_prompt=True) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_vocabulary_may_be_padded_and_never_be_too_small(tmp_path: Path) -> None:
    write_tokenizer(write_folder(tmp_path / "padded", fields("LlamaForCausalLM", vocab_size=320)))
    assert load_base(str(tmp_path / "padded")).config.vocab_size == 320
    write_tokenizer(write_folder(tmp_path / "small", fields("LlamaForCausalLM", vocab_size=256)))
    with pytest.raises(ModelFileCorruptError, match="the tokenizer has 264 tokens, the model 256"):
        load_base(str(tmp_path / "small"))


def test_shards_are_read_as_one_file_is(tmp_path: Path) -> None:
    state = random_state(LLAMA)
    whole, sharded = write_folder(tmp_path / "whole", LLAMA, state), write_shards(tmp_path / "sharded", state)
    assert is_complete(whole)
    assert is_complete(sharded)
    assert jax.tree.all(jax.tree.map(np.array_equal, read(whole), read(sharded)))
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert not is_complete(sharded)
    with pytest.raises(ModelFileMissingError, match="model-00002-of-00003"):
        read(sharded)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_expanded_exactly(dtype: type, tmp_path: Path) -> None:
    state = {name: values.astype(dtype) for name, values in random_state(LLAMA).items()}
    params = read(write_folder(tmp_path, LLAMA, state))
    np.testing.assert_array_equal(params["layers"]["up"][1], state["model.layers.1.mlp.up_proj.weight"].T.astype(np.float32))
    assert params["embed"].dtype == np.float32


def test_what_is_harmless_in_old_checkpoints_is_left_out(tmp_path: Path) -> None:
    config = CASES["llama-tied-llama3"]
    state = random_state(config)
    extra = {"lm_head.weight": state["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    params = read(write_folder(tmp_path, config, state | extra))
    assert "head" not in params


@pytest.mark.parametrize("unused", [{"gate": None}, {"hidden_act": None, "rms_norm_eps": None, "tie_word_embeddings": None}])
def test_fields_that_may_be_absent_have_the_defaults_of_transformers(unused: dict[str, Any], tmp_path: Path) -> None:
    config = read_config(write_folder(tmp_path, fields("LlamaForCausalLM", **new("default"), **unused), {}), "model")
    assert not config.tie_embeddings
    assert config.rms_norm_eps == (1e-6 if "rms_norm_eps" in unused else 1e-5)


def sparse(family: str, *absent: str, **changes: Any) -> dict[str, Any]:
    """A config.json of 64 query heads with these keys left out, or changed."""
    plain = fields(f"{family}ForCausalLM", num_attention_heads=64, hidden_size=256) | changes
    return {key: value for key, value in plain.items() if key not in absent}


@pytest.mark.parametrize(("family", "num_kv_heads", "head_dim"), [("Llama", 64, 4), ("Mistral", 8, 4), ("Qwen2", 32, 4), ("Qwen3", 32, 128)])
def test_sizes_of_heads_that_are_left_out_are_those_of_the_familys_configuration_class(
    family: str, num_kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    config = read_config(write_folder(tmp_path, sparse(family, "num_key_value_heads", "head_dim"), {}), "model")
    assert (config.num_kv_heads, config.head_dim) == (num_kv_heads, head_dim)


@pytest.mark.parametrize("max_context", [4096, 4097])
def test_a_mistral_that_states_no_window_has_one_of_4096_positions(max_context: int, tmp_path: Path) -> None:
    """As transformers has it, and the first Mistral's config.json says; null says that there is none."""
    absent = write_folder(tmp_path / "absent", sparse("Mistral", "sliding_window", max_position_embeddings=max_context), {})
    if max_context > 4096:
        with pytest.raises(ModelUnsupportedError, match=r"sliding_window 4096, which it is where the file states none .* smaller than .* 4097"):
            read_config(absent, "model")
    else:
        assert read_config(absent, "model").max_context == max_context
    null = write_folder(tmp_path / "null", sparse("Mistral", max_position_embeddings=max_context), {})
    assert read_config(null, "model").max_context == max_context
    for family in ("Llama", "Qwen2", "Qwen3"):
        other = write_folder(tmp_path / family, sparse(family, "sliding_window", max_position_embeddings=max_context), {})
        assert read_config(other, "model").max_context == max_context


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *((family, key) for family in ("Llama", "Mistral", "Qwen2", "Qwen3") for key in ("rms_norm_eps", "tie_word_embeddings", "vocab_size")),
        ("Mistral", "num_key_value_heads"),
        ("Qwen3", "head_dim"),
        ("Llama", "attention_bias"),
    ],
)
def test_null_where_it_means_nothing_is_refused(family: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileCorruptError, match=f"{key} is None, expected"):
        read_config(write_folder(tmp_path, sparse(family, **{key: None}), {}), "model")


def test_null_means_that_a_llamas_sizes_of_heads_follow_from_the_others(tmp_path: Path) -> None:
    config = read_config(write_folder(tmp_path, sparse("Llama", num_key_value_heads=None, head_dim=None), {}), "model")
    assert (config.num_kv_heads, config.head_dim) == (64, 4)


READ = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "sliding_window", "use_sliding_window", "layer_types"),
    *("attention_bias", "mlp_bias", "rope_theta", "rope_scaling"),
)
"""Every key that means something, but for those that only refuse."""

MAY_BE_LEFT_OUT = set(READ) - {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
}


@pytest.mark.slow
def test_every_key_that_is_left_out_or_null_means_what_it_means_to_transformers_or_is_refused(tmp_path: Path, run_reference: Any) -> None:
    given = {"use_sliding_window": False, "layer_types": None, "attention_bias": False, "mlp_bias": False, "rope_theta": 5e5, "rope_scaling": None}
    cases = {}
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        whole = sparse(family, num_attention_heads=32, **given)
        for key in READ:
            cases[f"{family}-{key}-absent"] = {name: value for name, value in whole.items() if name != key}
            cases[f"{family}-{key}-null"] = whole | {key: None}
    for name, config in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    run_reference("config_meanings.py", tmp_path)
    for name in cases:
        theirs = json.loads((tmp_path / name / "meaning.json").read_text())
        try:
            config = read_config(tmp_path / name, name)
        except (ModelFileCorruptError, ModelUnsupportedError):
            _, key, how = name.split("-")
            assert how == "null" or key not in MAY_BE_LEFT_OUT, name
            continue
        assert theirs is not None, f"{name}: transformers refuses it"
        rope = dict(config.rope.settings or ())
        ours = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "o_bias": config.o_bias}
        ours |= {"tie": config.tie_embeddings, "rope_type": rope["rope_type"], "rope_theta": rope["rope_theta"], "has_window": False, "act": "silu"}
        assert theirs == ours, name


def test_an_architecture_may_be_named_by_its_model_type(tmp_path: Path) -> None:
    assert read_config(write_folder(tmp_path, CASES["qwen3"] | {"architectures": None}, {}), "model").family == "Qwen3ForCausalLM"


FAMILIES = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("Llama", {"architectures": ["GPT2LMHeadModel"]}, f"GPT2LMHeadModel.*noria reads {FAMILIES}"),
        ("Llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("Llama", {"architectures": [], "model_type": "mamba"}, "'mamba'; noria reads"),
        ("Llama", {"hidden_act": "gelu"}, "'gelu'; noria reads 'silu'"),
        ("Llama", {"mlp_bias": True}, "mlp_bias"),
        ("Llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq.*noria reads float32, float16, bfloat16"),
        ("Llama", {"num_local_experts": 8}, "num_local_experts is 8.*no mixtures"),
        ("Llama", {"sliding_window": 128}, "sliding_window 128"),
        ("Mistral", {"sliding_window": 511}, "sliding_window 511 is smaller than max_position_embeddings 512"),
        ("Mistral", {"attention_bias": True}, "attention_bias"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("Qwen3", {"num_experts": 4, "moe_intermediate_size": 8}, "num_experts is 4"),
        ("Qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'; noria reads default, linear, llama3, yarn"),
        ("Llama", {"num_key_value_heads": 3}, "3 kv heads do not divide 4"),
        ("Llama", {"head_dim": 15}, "head size 15 is odd"),
    ],
)
def test_what_noria_does_not_implement_is_refused(family: str, change: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match=match):
        read_config(write_folder(tmp_path, fields(f"{family}ForCausalLM") | change, {}), "model")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": None}, "hidden_size is None, expected an integer"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_theta": 0.0}, "rotary positions"),
    ],
)
def test_a_configuration_that_is_missing_or_out_of_range_is_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileCorruptError, match=match):
        read_config(write_folder(tmp_path, fields("LlamaForCausalLM") | change, {}), "model")


@pytest.mark.parametrize("text", ["", "{", "[]", "\ufeff", "[" * 200_000])
def test_a_config_file_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileCorruptError, match=r"config\.json"):
        read_config(tmp_path, "model")


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    state = random_state(LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = [
        ({key: value for key, value in state.items() if key != name}, ModelFileCorruptError, f"lacks tensor '{name}'"),
        (state | {name: np.zeros((64, 96), np.float32)}, ModelFileCorruptError, r"shape \(64, 96\), expected \(96, 64\)"),
        (state | {name: np.full((96, 64), np.nan, np.float32)}, ModelFileCorruptError, "NaN"),
        (state | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}, ModelUnsupportedError, "does not use.*q_proj.bias"),
        ({key: value for key, value in state.items() if key != "lm_head.weight"}, ModelFileCorruptError, "lacks tensor 'lm_head.weight'"),
    ]
    for number, (tensors, error, match) in enumerate(wrong):
        with pytest.raises(error, match=match):
            read(write_folder(tmp_path / str(number), LLAMA, tensors))


def test_a_head_that_differs_from_the_embeddings_it_should_be_is_refused(tmp_path: Path) -> None:
    state = random_state(LLAMA)
    with pytest.raises(ModelFileCorruptError, match="set tie_word_embeddings to false"):
        read(write_folder(tmp_path, LLAMA | {"tie_word_embeddings": True}, state))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(ModelFileCorruptError, match="cut off"):
        read(tmp_path)


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "sharded", random_state(LLAMA))
    whole = json.loads((folder / INDEX).read_text())
    name, first, second = "model.norm.weight", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
    file_of = whole["weight_map"]
    wrong = [
        ("{", "cannot read"),
        ("[]", "no JSON object"),
        ("{}", "no weight_map"),
        (json.dumps({"weight_map": {}}), "no weight_map"),
        (json.dumps({"weight_map": {name: 3}}), "no weight_map"),
        (json.dumps({"weight_map": {name: "../" + first}}), "files of its folder"),
        (json.dumps({"weight_map": file_of | {name: second if file_of[name] == first else first}}), f"disagree on tensor '{name}'"),
        (json.dumps({"weight_map": {key: file for key, file in file_of.items() if key != name}}), f"disagree on tensor '{name}'"),
    ]
    for text, match in wrong:
        (folder / INDEX).write_text(text)
        with pytest.raises(ModelFileCorruptError, match=match):
            read(folder)


def test_a_folder_without_weights_or_configuration_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissingError, match=r"config\.json is missing"):
        load_base(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert not is_complete(tmp_path)
    with pytest.raises(ModelFileMissingError, match="no pickled weights"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("./nowhere", ModelFileMissingError, "no model folder or GGUF file at .*nowhere"),
        ("/a/b/c", ModelFileMissingError, "/a/b/c"),
        ("nowhere.gguf", ModelFileMissingError, r"nowhere\.gguf"),
        ("smollm2-135", ConfigError, "did you mean 'smollm2-135m'"),
        ("", ConfigError, "unknown base"),
    ],
)
def test_a_name_that_is_nothing_says_so(name: str, error: type[Exception], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        load_base(name)
