"""Reader of GGUF model files (version 2 and 3): metadata, tensor directory, and expansion of quantized tensors to float32.

    magic "GGUF" | version u32 | num_tensors u64 | num_pairs u64 | pairs: key, type u32, value | tensors: name, num_dims u32, dims u64.., kind u32,
    offset u64 | padding to `general.alignment` | tensor data

Layout and quantization formats after the GGUF specification and ggml's `ggml-common.h`. It parses the 50 thousand token strings of SmolLM2 in
0.1 s where the reference reader takes 1.7 s, and expands weights straight into their transposed place in the stacked arrays (`docs/decisions.md`).
A damaged file never gets further than an error: every count and offset is checked against the file's size before it is used.
Deliberately not here: what the tensors mean (`model/weights.py`), and writing.

    R row (a weight's output)   C column (a weight's input)   Z quantization block of 32 columns   Y byte of a block
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.types import FloatArray

Bytes: TypeAlias = npt.NDArray[np.uint8]
MetadataValue: TypeAlias = int | float | bool | str | list[Any]

_BLOCK: Final = 32
_ARRAY_TYPE: Final = 9
_STRING_TYPE: Final = 8
_BOOL_TYPE: Final = 7
_SCALAR_TYPES: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL_TYPE: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_MAX_DIMS: Final = 4


@dataclass(frozen=True, slots=True)
class _Format:
    """How one tensor kind stores its values: `block_bytes` bytes hold `block_size` consecutive values of a row."""

    name: str
    block_size: int
    block_bytes: int


_FORMATS: Final = {
    0: _Format("F32", 1, 4),
    1: _Format("F16", 1, 2),
    2: _Format("Q4_0", _BLOCK, 18),
    3: _Format("Q4_1", _BLOCK, 20),
    8: _Format("Q8_0", _BLOCK, 34),
    30: _Format("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its values in row-major order have `shape` ([out, in] for a weight matrix), stored as `raw_RY`, one row of bytes per row."""

    name: str
    shape: tuple[int, ...]
    format: _Format
    raw_RY: Bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file. Tensor bytes are views of the memory-mapped file: nothing is read before it is expanded."""

    path: Path
    metadata: Mapping[str, MetadataValue] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)


def read_gguf(path: Path) -> GgufFile:
    """Parse the header and map the data.

    Raises ModelFileMissingError (no such file), ModelFileCorruptError (not GGUF, truncated, impossible counts), ModelUnsupportedError (a version or
    quantization that noria does not read).
    """
    try:
        data: Bytes = np.asarray(np.memmap(path, np.uint8, mode="r"))
    except FileNotFoundError as error:
        raise ModelFileMissingError(f"no model file at {path}") from error
    except (OSError, ValueError) as error:
        raise ModelFileCorruptError(f"cannot map {path}: {error}") from error
    cursor = _Cursor(path, memoryview(data))
    if cursor.take(4) != b"GGUF":
        raise ModelFileCorruptError(f"{path} is not a GGUF file: it does not start with the bytes GGUF")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ModelUnsupportedError(f"{path} has GGUF version {version}; noria reads versions 2 and 3")
    num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    directory = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ModelFileCorruptError(f"{path}: general.alignment is {alignment!r}, expected a whole number > 0")
    start = -(-cursor.offset // alignment) * alignment
    return GgufFile(path, metadata, {entry.name: _locate(path, data, start, entry) for entry in directory})


@final
class _Cursor:
    """Reads the header front to back; owned by one `read_gguf` call. Every read is checked against the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.offset = path, data, 0

    def take(self, num_bytes: int) -> bytes:
        stop = self.offset + num_bytes
        if stop > len(self.data):
            raise ModelFileCorruptError(f"{self.path} ends inside its header: {len(self.data)} bytes, at least {stop} expected; download it again")
        taken = self.data[self.offset : stop].tobytes()
        self.offset = stop
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileCorruptError(f"{self.path}: text near byte {self.offset} is not UTF-8") from error

    def value(self, kind: int) -> MetadataValue:
        if kind == _STRING_TYPE:
            return self.string()
        if kind == _ARRAY_TYPE:
            return self.array(self.scalar("<I"), self.scalar("<Q"))
        scalar: MetadataValue = self.scalar(self.code(kind))
        return bool(scalar) if kind == _BOOL_TYPE else scalar

    def array(self, kind: int, length: int) -> list[Any]:
        if kind == _STRING_TYPE:
            return [self.string() for _ in range(length)]
        code = self.code(kind)  # arrays of arrays exist in the format, in no model, and are refused here
        return list(np.frombuffer(self.take(length * struct.calcsize(code)), code).tolist())

    def code(self, kind: int) -> str:
        if kind not in _SCALAR_TYPES:
            raise ModelFileCorruptError(f"{self.path}: unknown metadata type {kind} near byte {self.offset}")
        return _SCALAR_TYPES[kind]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of the tensor directory. shape: row-major. offset: bytes from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_entry(cursor: _Cursor) -> _Entry:
    name, num_dims = cursor.string(), cursor.scalar("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ModelFileCorruptError(f"{cursor.path}: tensor {name!r} has {num_dims} dimensions")
    dims = [cursor.scalar("<Q") for _ in range(num_dims)]
    return _Entry(name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q"))


def _locate(path: Path, data: Bytes, start: int, entry: _Entry) -> GgufTensor:
    layout = _FORMATS.get(entry.kind)
    if layout is None:
        known = ", ".join(f.name for f in _FORMATS.values())
        raise ModelUnsupportedError(f"{path}: tensor {entry.name!r} has quantization {entry.kind}; noria reads {known}")
    columns, num_rows = entry.shape[-1], math.prod(entry.shape[:-1])
    row_bytes, rest = divmod(columns * layout.block_bytes, layout.block_size)
    if min(entry.shape) == 0 or rest:
        raise ModelFileCorruptError(f"{path}: tensor {entry.name!r} of kind {layout.name} cannot have shape {entry.shape}")
    first = start + entry.offset
    last = first + num_rows * row_bytes
    if last > len(data):
        raise ModelFileCorruptError(f"{path} is truncated: tensor {entry.name!r} ends at byte {last} of {len(data)}; download it again")
    return GgufTensor(entry.name, entry.shape, layout, data[first:last].reshape(num_rows, row_bytes))


def expand(tensor: GgufTensor, out: FloatArray, *, transpose: bool = False, row_order: npt.NDArray[np.intp] | None = None) -> None:
    """Write a tensor's values into `out`, float32.

    out: [R, C] or [C] like the tensor, or [C, R] with `transpose`; contiguous. row_order: take rows in this order. Dequantization is float32
    `d * q` or `d * q + m`, bit-equal to the reference package. Transposing moves the packed bytes, an eighth of the floats.

    Raises ModelFileCorruptError: a NaN or infinite weight or scale.
    """
    raw_RY = tensor.raw_RY if row_order is None else tensor.raw_RY[row_order]
    if tensor.format.block_size == 1:
        values_RC = _plain(tensor.format.name, np.ascontiguousarray(raw_RY))
        _require_finite(tensor.name, values_RC)
        out[...] = values_RC.T if transpose else values_RC.reshape(out.shape)
        return
    raw_RZY = raw_RY.reshape(len(raw_RY), -1, tensor.format.block_bytes)
    num_blocks = raw_RZY.shape[1]
    out_ZCR = out.reshape(num_blocks, _BLOCK, -1) if transpose else out.reshape(-1, num_blocks, _BLOCK).transpose(1, 2, 0)
    _expand_blocks(tensor, raw_RZY, out_ZCR, transpose=transpose)


def _plain(name: str, raw_RY: Bytes) -> FloatArray:
    if name == "BF16":  # the upper half of a float32
        return (raw_RY.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw_RY.view({"F32": "<f4", "F16": "<f2"}[name]).astype(np.float32, copy=False)


def _expand_blocks(tensor: GgufTensor, raw_RZY: Bytes, out_ZCR: FloatArray, *, transpose: bool) -> None:
    """ggml's block formats: d f16 [, m f16], then 32 int8, or 16 bytes whose low nibbles are values 0..15 and high nibbles 16..31."""

    def scale(first: int) -> FloatArray:
        half_RZ = np.ascontiguousarray(raw_RZY[:, :, first : first + 2]).view("<f2")[..., 0]
        _require_finite(tensor.name, half_RZ)
        scale_ZR: FloatArray = half_RZ.astype(np.float32).T
        return np.ascontiguousarray(scale_ZR)[:, None] if transpose else scale_ZR[:, None]

    def codes(first: int) -> Bytes:
        codes_ZYR = raw_RZY[:, :, first:].transpose(1, 2, 0)
        return np.ascontiguousarray(codes_ZYR) if transpose else codes_ZYR

    if tensor.format.name == "Q8_0":
        np.multiply(codes(2).view(np.int8), scale(0), out=out_ZCR)
        return
    has_minimum = tensor.format.name == "Q4_1"
    d, q = scale(0), codes(4 if has_minimum else 2)
    low, high = q & 15, q >> 4
    if has_minimum:
        np.multiply(low, d, out=out_ZCR[:, :16])
        np.multiply(high, d, out=out_ZCR[:, 16:])
        out_ZCR += scale(2)
    else:  # Q4_0 counts from -8
        np.multiply(low.view(np.int8) - np.int8(8), d, out=out_ZCR[:, :16])
        np.multiply(high.view(np.int8) - np.int8(8), d, out=out_ZCR[:, 16:])


def _require_finite(name: str, values: npt.NDArray[np.floating[Any]]) -> None:
    if not np.isfinite(values).all():
        raise ModelFileCorruptError(f"tensor {name!r} has NaN or infinite values; download the model file again")
