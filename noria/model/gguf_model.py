"""What a GGUF file's metadata and tensors mean (llama.cpp's architectures of `config.FAMILIES`); what noria does not implement is refused by name.

llama.cpp stores q and k of its architecture "llama" with the two halves of each head interleaved, and the RoPE scaling of Llama 3.1 as a tensor of
divisors. Deliberately not here: the bytes of the format (`model/gguf_file.py`), tokenizers (`text/tokenizer_files.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileCorruptError, ModelUnsupportedError
from noria.model.config import FAMILIES, ModelConfig
from noria.model.gguf_file import GgufFile, GgufTensor, expand
from noria.model.params import Layout, Params, StoredTensor, load_params
from noria.model.rope import DEFAULT_THETA, Rope, read_rope
from noria.types import FloatArray

LAYOUT: Final = Layout(
    layer="blk.{}.",
    in_layer={
        "attn_norm": "attn_norm.weight",
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "o": "attn_output.weight",
        "mlp_norm": "ffn_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
        "q_bias": "attn_q.bias",
        "k_bias": "attn_k.bias",
        "v_bias": "attn_v.bias",
        "o_bias": "attn_output.bias",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
    },
    top={"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"},
)
_DIVISORS: Final = "rope_freqs.weight"
_PERMUTED: Final = "llama"  # the architecture whose q and k are stored interleaved
_NEUTRAL: Final = {
    "expert_count": 0,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "embedding_scale": 1,
    "residual_scale": 1,
    "logit_scale": 1,
    "rope.scaling.alpha": 0,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
"""Settings that change what a model computes and that noria does not implement, and the value of each that changes nothing."""


def read_config(file: GgufFile, name: str) -> ModelConfig:
    """The configuration that the metadata states. name: for messages.

    Raises ModelFileCorruptError (a key missing, of the wrong type or out of range), ModelUnsupportedError (another architecture, RoPE type, attention
    window, or setting).
    """
    meta = _read_metadata(file)
    hidden_size, num_heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    if num_heads < 1:
        raise ModelFileCorruptError(f"{file.path}: {meta.architecture}.attention.head_count is {num_heads}, expected >= 1")
    head_dim = meta.integer("attention.key_length", hidden_size // num_heads)
    if {head_dim} != {meta.integer(key, head_dim) for key in ("rope.dimension_count", "attention.value_length")}:
        raise ModelUnsupportedError(f"{file.path}: key, value and rotary sizes of a head differ, which noria does not implement")
    max_context = meta.integer("context_length")
    if 0 < (window := meta.integer("attention.sliding_window", 0)) < max_context:
        raise ModelUnsupportedError(f"{file.path}: attention windows of {window} positions in a context of {max_context}; noria reads full attention")
    family = next(name for name, family in FAMILIES.items() if family.gguf == meta.architecture)
    return ModelConfig(
        name=name,
        num_layers=meta.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=meta.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=meta.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=len(_tokens(file)),
        rope=_read_rope(meta, head_dim, max_context),
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        max_context=max_context,
        tie_embeddings=LAYOUT.top["head"] not in file.tensors,
        qkv_bias=FAMILIES[family].has_qkv_bias or LAYOUT.name_of("q_bias", 0) in file.tensors,
        o_bias=LAYOUT.name_of("o_bias", 0) in file.tensors,
        qk_norm=FAMILIES[family].has_qk_norm,
        family=family,
    )


def read_params(file: GgufFile, config: ModelConfig) -> Params:
    """All weights, expanded. Raises ModelFileCorruptError (missing, of the wrong shape, not finite), ModelUnsupportedError (left over)."""
    return load_params(config, LAYOUT, dict(_stored(file, config)), source=str(file.path))


def _stored(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, StoredTensor]]:
    is_permuted = FAMILIES[config.family].gguf == _PERMUTED
    for name, tensor in file.tensors.items():
        part = name.split(".")[-2] if "." in name else name
        num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part) if is_permuted else None
        if name != _DIVISORS:
            yield name, StoredTensor(tensor.shape, partial(_read, tensor, num_heads))


def _read(tensor: GgufTensor, num_heads: int | None) -> FloatArray:
    """Values with rows in the order of Hugging Face: interleaved halves of heads (llama.cpp, `permute`) are put back."""
    values = expand(tensor)
    return values if num_heads is None else values[_halves_order(len(values), num_heads)]


def _halves_order(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    return np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The metadata of the file's own architecture, by keys without its prefix."""

    file: GgufFile
    architecture: str

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, int, default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, float, default))

    def _get(self, key: str, kind: type, default: float | None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelFileCorruptError(f"{self.file.path}: metadata {self.architecture}.{key} is {value!r}, expected {kind.__name__}")
        return value


def _read_metadata(file: GgufFile) -> _Metadata:
    """Refuses what noria does not implement."""
    architecture, known = file.metadata.get("general.architecture"), sorted({family.gguf for family in FAMILIES.values()})
    if architecture not in known:
        raise ModelUnsupportedError(f"{file.path} has architecture {architecture!r}; noria reads {', '.join(known)}")
    for key, neutral in _NEUTRAL.items():
        value = file.metadata.get(f"{architecture}.{key}", neutral)
        if value != neutral:
            raise ModelUnsupportedError(f"{file.path}: metadata {architecture}.{key} is {value!r}; noria implements {neutral}")
    return _Metadata(file, architecture)


def _tokens(file: GgufFile) -> list[Any]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ModelFileCorruptError(f"{file.path}: metadata tokenizer.ggml.tokens is {tokens!r}, expected a list")
    return tokens


def _read_rope(meta: _Metadata, head_dim: int, max_context: int) -> Rope:
    """llama.cpp's defaults: no base is 10,000, no type is linear with the factor, no factor (or 0) is 1, no original length is the context length."""
    file, prefix = meta.file, f"{meta.architecture}.rope.scaling."
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0)) or 1.0
    kind = file.metadata.get(prefix + "type", "none" if factor == 1 else "linear")
    settings: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": meta.number("rope.freq_base", DEFAULT_THETA)}
    if kind in ("linear", "yarn"):
        settings["factor"] = factor
    if kind == "yarn":
        settings["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length", max_context)
        settings |= {key: file.metadata.get(f"{prefix}yarn_{key}") for key in ("beta_fast", "beta_slow")}
    divisors = file.tensors.get(_DIVISORS)
    return read_rope(settings, head_dim, source=str(file.path), divisors_F=None if divisors is None else expand(divisors))
