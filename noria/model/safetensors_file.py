"""safetensors files as float32, and one named error for each thing that can be wrong with one.

    8 bytes: length n of the header | n bytes of JSON: {tensor: {dtype, shape, data_offsets: [first, last)}} | the values

Parsed here and not with the `safetensors` package, whose NumPy side knows no bfloat16 in the versions that noria supports. Reading maps the file, so
that a shard's values are touched once, when they are expanded. Deliberately not here: what the tensors mean (`model/hf_folder.py`), and writing.
"""

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.plain_json import parse_json
from noria.types import FloatArray

_LENGTH: Final = struct.Struct("<Q")
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_DTYPES: Final = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One tensor. shape: row-major. dtype: F32, F16 or BF16. data: its bytes in the memory-mapped file, unread before `expand`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: npt.NDArray[np.uint8] = field(repr=False)


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """Parse the header and map the values.

    Raises ModelFileMissingError, ModelFileCorruptError (not safetensors, cut off, damaged), ModelUnsupportedError (another dtype: a quantized file).
    """
    try:
        memory = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except FileNotFoundError as error:
        raise ModelFileMissingError(f"no model file at {path}") from error
    except (OSError, ValueError) as error:
        raise ModelFileCorruptError(f"cannot read {path}: {error}") from error
    header = _read_header(path, memory)
    values = memory[_LENGTH.size + header.size_bytes :]
    tensors = {name: _tensor(path, name, entry, values) for name, entry in header.entries.items() if name != "__metadata__"}
    if (needed := sum(tensor.data.size for tensor in tensors.values())) != values.size:
        raise ModelFileCorruptError(f"{path} has {values.size} bytes of values, its tensors take {needed}; download it again")
    return tensors


def expand(tensor: SafeTensor) -> FloatArray:
    """The values, float32, in the tensor's shape. Raises ModelFileCorruptError if one is NaN or infinite."""
    values = tensor.data.view(_DTYPES[tensor.dtype]).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ModelFileCorruptError(f"tensor {tensor.name!r} has NaN or infinite values; download the model file again")
    return values.reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Header:
    size_bytes: int
    entries: dict[str, Any]


def _read_header(path: Path, memory: npt.NDArray[np.uint8]) -> _Header:
    size_bytes = _LENGTH.unpack(memory[: _LENGTH.size].tobytes())[0] if memory.size >= _LENGTH.size else 0
    if not 2 <= size_bytes <= min(_MAX_HEADER_BYTES, memory.size - _LENGTH.size):
        raise ModelFileCorruptError(f"{path} is not a safetensors file, or is cut off at {memory.size} bytes; download it again")
    try:
        entries = parse_json(memory[_LENGTH.size : _LENGTH.size + size_bytes].tobytes())
    except ValueError as error:
        raise ModelFileCorruptError(f"{path} is not a safetensors file: {error}; download it again") from error
    if not isinstance(entries, dict):
        raise ModelFileCorruptError(f"{path} is not a safetensors file: its header is no object; download it again")
    return _Header(size_bytes, entries)


def _tensor(path: Path, name: str, entry: Any, values: npt.NDArray[np.uint8]) -> SafeTensor:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ModelFileCorruptError(f"{path}: tensor {name!r} is described by {entry!r}; download it again") from error
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ModelFileCorruptError(f"{path}: tensor {name!r} is described by {entry!r}; download it again")
    if dtype not in _DTYPES:
        raise ModelUnsupportedError(f"{path}: tensor {name!r} has dtype {dtype}; noria reads {', '.join(_DTYPES)}")
    if last > values.size or last - first != math.prod(shape) * _DTYPES[dtype].itemsize:
        place = f"bytes {first} to {last} of {values.size}"
        raise ModelFileCorruptError(f"{path} is cut off or damaged: tensor {name!r} {shape} {dtype} at {place}; download it again")
    return SafeTensor(name, shape, dtype, values[first:last])
