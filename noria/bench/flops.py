"""FLOPs of a training step, by one pure function of a token tree: what a comparison of two ways to compute the same gradient may at most show.

Counted is what the mathematics needs, not what an executor does twice: forward and cotangents of the frozen matrices, adapters with their gradients,
attention over exactly the pairs that the mask rule allows, the head on the entries. A multiplication with its addition counts as two.
"""

import numpy as np

from noria.model.config import ModelConfig
from noria.model.lora import module_sizes
from noria.types import TokenTree

FROZEN_PASSES = 2
"""Products of a frozen matrix: forward, and the cotangent of its input."""

ADAPTER_PASSES = 3
"""Products of a trained matrix: as above, and its own gradient."""

ATTENTION_PASSES = 6
"""Products per pair of positions: scores and values forward; the cotangents of weights, queries, keys and values backward."""


def training_flops(tree: TokenTree, config: ModelConfig, rank: int) -> float:
    """FLOPs of the gradient of a tree's loss with LoRA of `rank` on all linears.

    A position attends to itself and all above it, so the tree's pairs are the sum of depth + 1, whatever is shared.
    """
    sizes = module_sizes(config).values()
    frozen = sum(size_in * size_out for size_in, size_out in sizes)
    adapters = sum((size_in + size_out) * rank for size_in, size_out in sizes)
    per_position = FROZEN_PASSES * frozen + ADAPTER_PASSES * adapters
    pairs = float(np.sum(tree.depth_T.astype(np.int64) + 1))
    attention = ATTENTION_PASSES * config.num_heads * config.head_dim * pairs
    head = FROZEN_PASSES * config.vocab_size * config.hidden_size * len(tree.entries)
    return 2.0 * (config.num_layers * (per_position * len(tree) + attention) + head)
