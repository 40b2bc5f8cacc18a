"""Bytes: what a compiled program needs at its worst, what lives beside it, and what an executor's memory ought to be made of."""

import math
from typing import Any

import jax
import numpy as np

from noria.model.config import ModelConfig
from noria.model.lora import adapter_shapes
from noria.rl.packing import ENTRY_CHUNK
from noria.types import TILE

FLOAT_BYTES = 4


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves of a tree: arrays, or shapes of arrays."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def program_bytes(jitted: Any, *arguments: Any, **named: Any) -> int:
    """The compiler's own figure of a jitted function at these arguments (arrays or shapes): arguments + temporaries + results that reuse nothing."""
    figures = jitted.lower(*arguments, **named).compile().memory_analysis()
    new_output = figures.output_size_in_bytes - figures.alias_size_in_bytes
    return int(figures.argument_size_in_bytes + figures.temp_size_in_bytes + new_output)


def chunk_bytes(config: ModelConfig, num_positions: int) -> int:
    """One chunk's activations, float32: what the forward pass keeps of all layers, one layer's values and their cotangents, the head's logits.

    Kept per layer and position: the layer's input, attention's output and log-sum-exp, keys and values. Of the one layer that is pulled: its normed
    inputs, queries, keys, values, attention's output, three mlp products.
    """
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    kept = config.num_layers * (config.hidden_size + heads + config.num_heads + 2 * kv_heads) + config.hidden_size
    layer = 3 * config.hidden_size + 2 * heads + 2 * kv_heads + 3 * config.intermediate_size
    logits = 2 * ENTRY_CHUNK * config.vocab_size
    return FLOAT_BYTES * (num_positions * (kept + 2 * layer) + logits)


def adapter_bytes(config: ModelConfig, rank: int, num_slots: int) -> int:
    """Bytes of all slots' adapters, or of their gradients."""
    shapes = adapter_shapes(config, rank)
    return FLOAT_BYTES * num_slots * config.num_layers * sum(math.prod(shape) for side in shapes.values() for shape in side.values())


def path_bytes(config: ModelConfig, num_positions: int) -> int:
    """Bytes of the keys and values of a path and of their gradients, float32; whole blocks."""
    blocks = -(-num_positions // TILE)
    return 2 * blocks * TILE * config.kv_bytes_per_position(np.float32)
