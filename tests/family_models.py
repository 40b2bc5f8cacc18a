"""Builder of small random models of every family, as Hugging Face folders and as GGUF files, each spelled out independently of the loaders."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from llama_file import MERGES, SPECIAL, permuted, tokens, write_gguf
from safetensors.numpy import save_file

Fields = dict[str, Any]
State = dict[str, np.ndarray]

ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64}
YARN = {"type": "yarn", "factor": 4.0, ORIGINAL: 64}
NUM_IDS = 200  # beyond the original context of 64 positions


def fields(family: str, **changes: Any) -> Fields:
    """A config.json of two layers. A change to None leaves the field out."""
    model_type = family.removesuffix("ForCausalLM").lower()
    plain = {
        "architectures": [family],
        "model_type": model_type,
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": None,
        "torch_dtype": "float32",
    }
    kept_null = {"sliding_window"}
    return {key: value for key, value in (plain | changes).items() if value is not None or key in kept_null}


def new(kind: str, theta: float = 10_000.0, **settings: Any) -> Fields:
    """The newer spelling of RoPE settings."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | {k: v for k, v in settings.items() if k not in ("type", "rope_type")}}


def old(theta: float, scaling: dict[str, Any] | None = None) -> Fields:
    """The older one."""
    return {"rope_theta": theta} | ({} if scaling is None else {"rope_scaling": scaling})


CASES: dict[str, Fields] = {
    "llama": fields("LlamaForCausalLM", **new("default")),
    "llama-tied-llama3": fields("LlamaForCausalLM", tie_word_embeddings=True, **new("llama3", 500_000.0, **LLAMA3)),
    "llama-llama3-old": fields("LlamaForCausalLM", **old(500_000.0, LLAMA3)),
    "llama-linear-old": fields("LlamaForCausalLM", **old(10_000.0, {"type": "linear", "factor": 4.0})),
    "llama-linear": fields("LlamaForCausalLM", **new("linear", factor=4.0)),
    "llama-yarn": fields("LlamaForCausalLM", **new("yarn", **YARN)),
    "llama-yarn-tuned": fields("LlamaForCausalLM", **new("yarn", **YARN, attention_factor=0.9, beta_fast=16, beta_slow=2, truncate=False)),
    "llama-bias": fields("LlamaForCausalLM", attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1, **old(10_000.0)),
    "mistral": fields("MistralForCausalLM", head_dim=32, sliding_window=512, **old(1_000_000.0)),
    "mistral-tied": fields("MistralForCausalLM", head_dim=None, tie_word_embeddings=True, num_key_value_heads=4, **new("default", 1_000_000.0)),
    "qwen2": fields("Qwen2ForCausalLM", head_dim=None, use_sliding_window=False, sliding_window=128, **old(1_000_000.0, YARN)),
    "qwen2-tied": fields("Qwen2ForCausalLM", head_dim=None, tie_word_embeddings=True, **new("default", 1_000_000.0)),
    "qwen3": fields("Qwen3ForCausalLM", head_dim=32, **new("yarn", 1_000_000.0, **YARN)),
    "qwen3-tied": fields("Qwen3ForCausalLM", head_dim=32, tie_word_embeddings=True, use_sliding_window=False, **old(1_000_000.0)),
    "qwen3-bias": fields("Qwen3ForCausalLM", head_dim=32, attention_bias=True, **new("default", 1_000_000.0)),
}


def sizes(config: Fields) -> tuple[int, int, int]:
    """Head size, and the features of all query and all kv heads."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return head_dim, config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim


def random_state(config: Fields, seed: int = 0) -> State:
    """Random weights under Hugging Face's names; biases and norms far from their initial 0 and 1, so that one left out would show."""
    rng = np.random.default_rng(seed)
    d, f, (h, n, k) = config["hidden_size"], config["intermediate_size"], sizes(config)
    family = config["architectures"][0]
    shapes = {"self_attn.q_proj": (n, d), "self_attn.k_proj": (k, d), "self_attn.v_proj": (k, d), "self_attn.o_proj": (d, n)}
    shapes |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    biased = {"self_attn.q_proj": n, "self_attn.k_proj": k, "self_attn.v_proj": k} if family == "Qwen2ForCausalLM" else {}
    biased = {"self_attn.q_proj": n, "self_attn.k_proj": k, "self_attn.v_proj": k, "self_attn.o_proj": d} if config.get("attention_bias") else biased
    norms = {"input_layernorm": d, "post_attention_layernorm": d} | ({"self_attn.q_norm": h, "self_attn.k_norm": h} if "Qwen3" in family else {})
    table = (config["vocab_size"], d)
    state = {"model.embed_tokens.weight": rng.normal(size=table), "model.norm.weight": rng.uniform(0.5, 1.5, d)}
    if not config["tie_word_embeddings"]:
        state["lm_head.weight"] = rng.normal(size=table) / math.sqrt(d)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        state |= {f"{at}{name}.weight": rng.normal(size=shape) / math.sqrt(shape[1]) for name, shape in shapes.items()}
        state |= {f"{at}{name}.bias": 0.5 * rng.normal(size=size) for name, size in biased.items()}
        state |= {f"{at}{name}.weight": rng.uniform(0.5, 1.5, size) for name, size in norms.items()}
    return {name: values.astype(np.float32) for name, values in state.items()}


def write_folder(folder: Path, config: Fields, state: State | None = None) -> Path:
    """A Hugging Face folder, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_state(config) if state is None else state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> None:
    """A small byte-level tokenizer of 264 tokens with a chat template."""
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens())}, "merges": [merge.split(" ") for merge in MERGES]}
    special = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in enumerate(SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    fields = {"version": "1.0", "added_tokens": special, "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(fields | {"truncation": None, "padding": None, "normalizer": None, "post_processor": None}))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(config: Fields, state: State) -> State:
    """The same weights as llama.cpp's converter lays them out; Llama 3.1's RoPE scaling becomes a tensor of divisors."""
    is_llama = config["model_type"] in ("llama", "mistral")
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    tensors = {}
    for name, values in state.items():
        if name in top:
            tensors[top[name]] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        laid_out = permuted(values, heads[module]) if is_llama and module in heads else values
        tensors[f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"] = laid_out
    settings = rope_settings(config)
    return tensors | ({"rope_freqs.weight": llama3_divisors(settings, sizes(config)[0])} if settings["rope_type"] == "llama3" else {})


def rope_settings(config: Fields) -> dict[str, Any]:
    """RoPE settings of either spelling, in the newer one."""
    settings = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    return settings | {"rope_type": settings.get("rope_type") or settings.get("type") or "default"}


def llama3_divisors(settings: dict[str, Any], head_dim: int) -> np.ndarray:
    """By how much Llama 3.1 divides each frequency: written with a loop, as a reference."""
    divisors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * settings["rope_theta"] ** (i / head_dim)
        long, short = settings[ORIGINAL] / settings["low_freq_factor"], settings[ORIGINAL] / settings["high_freq_factor"]
        if wave < short:
            divisors.append(1.0)
        elif wave > long:
            divisors.append(settings["factor"])
        else:
            smooth = (settings[ORIGINAL] / wave - settings["low_freq_factor"]) / (settings["high_freq_factor"] - settings["low_freq_factor"])
            divisors.append(1 / ((1 - smooth) / settings["factor"] + smooth))
    return np.array(divisors, np.float32)


def gguf_metadata(config: Fields) -> dict[str, Any]:
    """What a GGUF file of this model says about itself."""
    prefix = "llama" if config["model_type"] == "mistral" else config["model_type"]
    head_dim, _, _ = sizes(config)
    settings = rope_settings(config)
    info = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(settings["rope_theta"]),
    }
    if settings["rope_type"] in ("linear", "yarn"):
        info |= {"rope.scaling.type": settings["rope_type"], "rope.scaling.factor": settings["factor"]}
    if settings["rope_type"] == "yarn":
        info["rope.scaling.original_context_length"] = settings[ORIGINAL]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (config["vocab_size"] - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {"general.architecture": prefix} | {f"{prefix}.{key}": value for key, value in info.items()} | tokenizer


def write_family_gguf(path: Path, config: Fields, state: State, **changes: Any) -> Path:
    """A float32 GGUF file of the model. changes: metadata without the architecture's prefix, dots written as __."""
    info = gguf_metadata(config)
    prefix = info["general.architecture"]
    return write_gguf(path, info | {f"{prefix}.{key.replace('__', '.')}": value for key, value in changes.items()}, gguf_tensors(config, state))
