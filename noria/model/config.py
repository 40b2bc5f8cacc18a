"""Shape and constants of a decoder-only language model of the Llama family, and the numbers that follow from them.

Shape letters, used in every array name of noria:
    L layer   D model   F mlp   N query heads   K kv heads   H head size   V vocabulary

This module deliberately reads no file: `model/weights.py` makes a `ModelConfig` from a model file's metadata.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileCorruptError, ModelUnsupportedError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder: RMSNorm, rotary positions (halves convention), grouped-query attention, gated SiLU MLP, no biases.

    name: for messages. num_layers L, hidden_size D, intermediate_size F, num_heads N, num_kv_heads K, head_dim H, vocab_size V: all >= 1.
    rope_theta: base of the rotary frequencies, > 0. rms_norm_eps: > 0. max_context: positions the model was trained for.
    tie_embeddings: the unembedding is the embedding.

    Raises ModelFileCorruptError if a number is out of range, ModelUnsupportedError for a readable shape that noria does not implement
    (query heads that kv heads do not divide, an odd head size).
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_context: int
    tie_embeddings: bool

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_context")
        for field in (*sizes, "rope_theta", "rms_norm_eps"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ModelFileCorruptError(f"{self.name}: {field} is {value}, expected a finite number > 0")
        if self.num_heads % self.num_kv_heads:
            raise ModelUnsupportedError(f"{self.name}: {self.num_kv_heads} kv heads do not divide {self.num_heads} query heads")
        if self.head_dim % 2:
            raise ModelUnsupportedError(f"{self.name}: head size {self.head_dim} is odd; rotary positions pair its two halves")

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight of one layer, as stored: matrices are [in, out], so that y = x @ w."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        n, k = self.num_heads * h, self.num_kv_heads * h
        return {
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
