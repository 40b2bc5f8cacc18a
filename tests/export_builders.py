"""Builders for export tests: one tiny base per family, tied and untied, random adapters, and their folders."""

import json

import numpy as np
from llama_file import byte_alphabet
from safetensors.numpy import load_file, save_file

from noria.model import lora
from noria.model.config import ModelConfig
from noria.model.hf_folder import LAYOUT
from noria.model.hf_writer import METADATA, config_fields, write_json
from noria.model.params import random_params
from noria.model.rope import read_rope
from noria.model.weights import LoadedBase
from noria.text.tokenizer import SpecialTokens, byte_level_bpe
from noria.types import LoraSpec

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def a_config(**changes):
    """A tiny Llama."""
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 264}
    rest = {"rms_norm_eps": 1e-5, "max_context": 64, "tie_embeddings": True, "name": "base"}
    settings = {"rope_theta": 10_000.0} | changes.pop("rope", {})
    fields = sizes | rest | changes
    return ModelConfig(**fields, rope=read_rope(settings, fields["head_dim"], source="a test"))


FAMILIES = {
    "llama": a_config(rope=LLAMA3),
    "llama-biases": a_config(tie_embeddings=False, qkv_bias=True, o_bias=True),
    "mistral": a_config(tie_embeddings=False, family="MistralForCausalLM"),
    "mistral-tied": a_config(family="MistralForCausalLM"),
    "qwen2": a_config(qkv_bias=True, family="Qwen2ForCausalLM"),
    "qwen2-untied": a_config(qkv_bias=True, family="Qwen2ForCausalLM", tie_embeddings=False),
    "qwen3": a_config(qk_norm=True, head_dim=16, family="Qwen3ForCausalLM"),
    "qwen3-untied": a_config(qk_norm=True, head_dim=16, family="Qwen3ForCausalLM", tie_embeddings=False),
}


def a_tokenizer():
    """A token per byte, and two special ones: text begins with <s>, turns end with </s>."""
    return byte_level_bpe([*byte_alphabet(), "<s>", "</s>"], [], SpecialTokens((256, 257), (257,), 256), split="gpt-2")


def a_base(config, seed=0):
    return LoadedBase(config, random_params(config, seed), a_tokenizer())


def write_base(folder, base):
    """The base as a Hugging Face folder, without a tokenizer."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config_fields(base.config, tie_embeddings=base.config.tie_embeddings, dtype="float32"))
    tensors = {LAYOUT.name_of(name, -1): base.params[name] for name in base.config.top_shapes}
    for name, stacked in base.params["layers"].items():
        tensors |= {LAYOUT.name_of(name, layer): np.ascontiguousarray(weight.T) for layer, weight in enumerate(stacked)}
    save_file(tensors, folder / "model.safetensors", METADATA)


def random_adapter(config, spec, seed=0, *, max_rank=None, head=False):
    """Random a and b in every module that `spec` trains, and in the unembedding where `head`; deltas move logits by about 0.1."""
    rng, max_rank = np.random.default_rng(seed), max_rank or spec.rank
    modules = dict.fromkeys((*lora.trained_modules(spec), *(("head",) if head else ())))
    shapes = lora.host_shapes(config, max_rank)
    adapter = {side: {m: np.zeros(shape, np.float32) for m, shape in shapes[side].items() if m in lora.MODULES or m in modules} for side in shapes}
    for module in modules:
        a, b = adapter["a"][module][:, :, : spec.rank], adapter["b"][module][:, : spec.rank]
        a[...] = rng.normal(size=a.shape) / np.sqrt(a.shape[1])
        b[...] = rng.normal(size=b.shape) * 0.2 / spec.scale / np.sqrt(spec.rank)
    return adapter


def lora_of(kind, rank=4, alpha=8.0, use_rslora=False):
    """kind: "attn", "mlp", "all" or "head" (all and the unembedding)."""
    return LoraSpec(rank, alpha, train_attn=kind != "mlp", train_mlp=kind != "attn", use_rslora=use_rslora, train_unembed=kind == "head")


def rewrite_config(folder, **changes):
    """Change fields of adapter_config.json; None of ... removes one."""
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


def rewrite_tensors(folder, change):
    """Save the tensors again after `change(tensors)`, which may return others."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, path)
