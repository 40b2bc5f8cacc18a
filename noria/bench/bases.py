"""Bases to measure on: a whole one, or one cut to its first layers where the whole one takes minutes a repeat; then its name says so."""

from dataclasses import replace

from noria.model.config import ModelConfig
from noria.model.params import Params, random_params
from noria.model.rope import plain_rope
from noria.model.weights import LoadedBase, load_base
from noria.text.tokenizer import ByteTokenizer


def base_of(name: str, num_layers: int | None = None) -> LoadedBase:
    """The base, cut to its first `num_layers` layers; None: all of them. Raises what `load_base` raises."""
    loaded = load_base(name)
    if num_layers is None or num_layers >= loaded.config.num_layers:
        return loaded
    params: Params = {**loaded.params, "layers": {key: leaf[:num_layers] for key, leaf in loaded.params["layers"].items()}}
    config = replace(loaded.config, name=f"{name}-{num_layers}-layers", num_layers=num_layers)
    return replace(loaded, config=config, params=params)


def shape_of_06b(num_layers: int = 28) -> LoadedBase:
    """Random weights in the shape of a 0.6B model, or of its first layers (Qwen3-0.6B: 28 layers of 1024, 16 query and 8 kv heads of 128)."""
    config = ModelConfig(
        name="shape-of-0.6b" if num_layers == 28 else f"shape-of-0.6b-{num_layers}-layers",
        num_layers=num_layers,
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        rope=plain_rope(1_000_000.0, 128),
        rms_norm_eps=1e-6,
        max_context=1 << 21,
        tie_embeddings=True,
        qk_norm=True,
        family="Qwen3ForCausalLM",
    )
    return LoadedBase(config, random_params(config, seed=0), ByteTokenizer())
