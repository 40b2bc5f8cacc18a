"""Shape and constants of a decoder-only language model, the families that noria reads, and the numbers that follow from them.

There is one decoder. What sets a family apart is data: whether projections have biases, whether query and key heads are normed, how positions scale.

Shape letters, used in every array name of noria:
    L layer   D model   F mlp   N query heads   K kv heads   H head size   V vocabulary

This module deliberately reads no file: `model/hf_folder.py` and `model/gguf_model.py` make a `ModelConfig` of a model's files.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileCorruptError, ModelUnsupportedError
from noria.model.rope import Rope


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture adds to the plain decoder.

    model_type: in config.json. gguf: llama.cpp's name of it. has_qkv_bias, has_qk_norm: always. reads_attention_bias: `attention_bias` in config.json
    gives q, k, v and o biases. window_needs_flag: `sliding_window` counts only where `use_sliding_window` is true.

    num_kv_heads, head_dim, sliding_window: what config.json means where it leaves them out (the configuration classes of transformers 5.24); None: as
    many as there are query heads, hidden size / query heads, no window.
    """

    model_type: str
    gguf: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    reads_attention_bias: bool = False
    window_needs_flag: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None


FAMILIES: Final = {
    "LlamaForCausalLM": Family("llama", "llama", reads_attention_bias=True),
    "MistralForCausalLM": Family("mistral", "llama", num_kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", "qwen2", has_qkv_bias=True, window_needs_flag=True, num_kv_heads=32),
    "Qwen3ForCausalLM": Family("qwen3", "qwen3", has_qk_norm=True, reads_attention_bias=True, window_needs_flag=True, num_kv_heads=32, head_dim=128),
}
"""Every architecture that noria reads, by its name in config.json."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary positions (halves convention), grouped-query attention, gated SiLU MLP.

    name: for messages. num_layers L, hidden_size D, intermediate_size F, num_heads N, num_kv_heads K, head_dim H, vocab_size V: all >= 1.
    rope: rotary frequencies of H / 2 pairs. rms_norm_eps: > 0. max_context: positions the model was trained for. tie_embeddings: the unembedding is
    the embedding. qkv_bias, o_bias: the projections have biases. qk_norm: each head of q and k is normed before it is rotated. family: the
    architecture's name in config.json, a key of FAMILIES.

    Raises ModelFileCorruptError if a number is out of range, ModelUnsupportedError for a readable shape that noria does not implement
    (query heads that kv heads do not divide, an odd head size, an unknown family).
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope: Rope
    rms_norm_eps: float
    max_context: int
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    family: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_context")
        for field in (*sizes, "rms_norm_eps"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ModelFileCorruptError(f"{self.name}: {field} is {value}, expected a finite number > 0")
        if self.num_heads % self.num_kv_heads:
            raise ModelUnsupportedError(f"{self.name}: {self.num_kv_heads} kv heads do not divide {self.num_heads} query heads")
        if self.head_dim % 2:
            raise ModelUnsupportedError(f"{self.name}: head size {self.head_dim} is odd; rotary positions pair its two halves")
        if self.family not in FAMILIES:
            raise ModelUnsupportedError(f"{self.name} has architecture {self.family!r}; noria reads {', '.join(FAMILIES)}")
        if len(self.rope.inverse_frequencies) != self.head_dim // 2:
            raise ModelFileCorruptError(f"{self.name}: {len(self.rope.inverse_frequencies)} rotary frequencies for heads of size {self.head_dim}")

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight of one layer, as stored: matrices are [in, out], so that y = x @ w. Biases and head norms only where there are any."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        n, k = self.num_heads * h, self.num_kv_heads * h
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (d,),
            "q": (d, n),
            "k": (d, k),
            "v": (d, k),
            "o": (n, d),
            "mlp_norm": (d,),
            "gate": (d, f),
            "up": (d, f),
            "down": (f, d),
        }
        shapes |= {"q_bias": (n,), "k_bias": (k,), "v_bias": (k,)} if self.qkv_bias else {}
        shapes |= {"o_bias": (d,)} if self.o_bias else {}
        return shapes | ({"q_norm": (h,), "k_norm": (h,)} if self.qk_norm else {})

    @property
    def top_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight outside the layers; `head` exists only when the embeddings are untied."""
        table = (self.vocab_size, self.hidden_size)
        return {"embed": table, "final_norm": (self.hidden_size,)} | ({} if self.tie_embeddings else {"head": table})

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        in_layer = sum(math.prod(shape) for shape in self.layer_shapes.values())
        return self.num_layers * in_layer + sum(math.prod(shape) for shape in self.top_shapes.values())

    def kv_bytes_per_position(self, dtype: npt.DTypeLike | type[Any]) -> int:
        """Bytes of K and V of one position over all layers, in `dtype`: 2 * L * K * H * itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * np.dtype(dtype).itemsize
