"""A model's weights in host memory: how they are laid out, and how they are filled from whatever a file calls them.

All arrays start on 64-byte borders, and so does each layer's slice where its size allows it, so that `model/placement.py` can hand them to JAX
without a copy. Deliberately not here: file formats (`model/gguf_model.py`, `model/hf_folder.py`), devices and dtypes (`model/placement.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileCorruptError, ModelUnsupportedError
from noria.model.config import ModelConfig
from noria.types import FloatArray

Params: TypeAlias = dict[str, Any]
"""Weights: {"embed": [V, D], "final_norm": [D], "layers": {name: [L, ...] with the shapes of `ModelConfig.layer_shapes`}}, and "head": [V, D] only
when the embeddings are untied. Matrices are [in, out], so that y = x @ w."""

ALIGNMENT_BYTES: Final = 64
"""XLA's alignment of host buffers: JAX on CPU aliases a NumPy array that starts on such a border, and copies any other."""

_LINE_ROWS: Final = 16  # of float32 in 64 bytes
_EVERY_LAYER_HAS: Final = 9  # tensors, in every family


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a model file. shape: row-major, [out, in] for a matrix of a layer. read: its values in that shape, float32, all finite."""

    shape: tuple[int, ...]
    read: Callable[[], FloatArray]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a file format calls the weights. layer: prefix of layer n's tensors, with {} for n. in_layer, top: by our name of the weight."""

    layer: str
    in_layer: Mapping[str, str]
    top: Mapping[str, str]

    def name_of(self, weight: str, layer: int) -> str:
        """The tensor's name; layer -1 for weights outside the layers."""
        return self.top[weight] if layer < 0 else self.layer.format(layer) + self.in_layer[weight]


def load_params(config: ModelConfig, layout: Layout, tensors: Mapping[str, StoredTensor], *, source: str) -> Params:
    """Every weight from its tensor: all names and shapes are checked before any value is read, and no tensor may be left over.

    source: the file or folder, for messages. Raises ModelFileCorruptError (a tensor missing or of the wrong shape, values that are not finite),
    ModelUnsupportedError (a tensor that noria would silently ignore).
    """
    if config.num_layers * _EVERY_LAYER_HAS > len(tensors):  # before a damaged count makes the table below huge
        raise ModelFileCorruptError(f"{source} has {len(tensors)} tensors, too few for its {config.num_layers} layers")
    shapes = {(name, -1): shape for name, shape in config.top_shapes.items()}
    shapes |= {(name, layer): shape[::-1] for layer in range(config.num_layers) for name, shape in config.layer_shapes.items()}
    names = {key: layout.name_of(*key) for key in shapes}
    if left_over := tensors.keys() - names.values():
        raise ModelUnsupportedError(f"{source} has tensors that noria does not use, for example {min(left_over)!r}; its results would be wrong")
    for key, name in names.items():
        if name not in tensors:
            raise ModelFileCorruptError(f"{source} lacks tensor {name!r}")
        if tensors[name].shape != shapes[key]:
            raise ModelFileCorruptError(f"{source}: tensor {name!r} has shape {tensors[name].shape}, expected {shapes[key]}")
    params = _allocate(config)
    for (weight, layer), out in _leaves(params, config):
        values = tensors[names[weight, layer]].read()
        if layer < 0 or values.ndim == 1:
            out[...] = values
        else:
            _transpose(values, out)
    return _read_only(params)


def _transpose(values: FloatArray, out: FloatArray) -> None:
    """out = values.T, by rows that fill one cache line of `out`: seven times as fast as in one go for 14,336 x 4,096 (1.1 s), on one core."""
    for row in range(0, len(values), _LINE_ROWS):
        out[:, row : row + _LINE_ROWS] = values[row : row + _LINE_ROWS].T


def random_params(config: ModelConfig, seed: int) -> Params:
    """Random weights for tests and for trying things out; the same bits for the same seed on every platform and NumPy version.

    Uniform with variance 1 / in (embeddings 1 / D, norms 1 +- 0.1, biases +- 0.3): activations and logits have a spread near 1, so that sampling is
    neither uniform nor greedy. Made from Philox's raw output, which NumPy guarantees to keep, where its distributions may change (NEP 19).
    """
    bits = np.random.Philox(seed)
    params = _allocate(config)
    for (name, _), out in _leaves(params, config):
        unit = (bits.random_raw(out.size) >> np.uint64(40)).astype(np.float32).reshape(out.shape) * np.float32(2.0**-23) - np.float32(1)
        if name.endswith("norm"):
            out[...] = 1 + np.float32(0.1) * unit
        elif name.endswith("bias"):
            out[...] = np.float32(0.3) * unit
        else:
            fan_in = config.hidden_size if name in config.top_shapes else out.shape[0]
            out[...] = unit * np.float32(math.sqrt(3 / fan_in))
    return _read_only(params)


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """An uninitialized array that starts on a 64-byte border."""
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[first : first + size_bytes].view(dtype).reshape(shape)


def _allocate(config: ModelConfig) -> Params:
    layers = {name: aligned_empty((config.num_layers, *shape)) for name, shape in config.layer_shapes.items()}
    return {name: aligned_empty(shape) for name, shape in config.top_shapes.items()} | {"layers": layers}


def _leaves(params: Params, config: ModelConfig) -> Iterator[tuple[tuple[str, int], FloatArray]]:
    """Each weight's name, its layer (-1 outside the layers), and its view into the stacked arrays."""
    for name in config.top_shapes:
        yield (name, -1), params[name]
    for layer in range(config.num_layers):
        for name in config.layer_shapes:
            yield (name, layer), params["layers"][name][layer]


def _read_only(params: Params) -> Params:
    """Freeze: JAX may alias this memory for as long as the process lives."""
    for value in params.values():
        for array in value.values() if isinstance(value, dict) else (value,):
            array.flags.writeable = False
    return params
