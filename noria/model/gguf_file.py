"""Reading GGUF model files with the `gguf` package, and one named error for each thing that can be wrong with one.

What the package's reader does not do is added here: it takes fewer bytes than asked for at the end of a file, so that a damaged length goes unnoticed
or on for ever, and it reads big-endian files without turning their weights round.
Deliberately not here: what the tensors mean (`model/weights.py`), and writing.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, quants

from noria.errors import ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.types import FloatArray

SUPPORTED: Final = tuple(kind for kind in GGMLQuantizationType if kind.name in ("F32", "F16") or hasattr(quants, kind.name))
"""The tensor kinds that the package expands: it has a class of the same name for each but the two plain ones."""

_HEADER: Final = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata pairs
_VERSIONS: Final = (2, 3)
_MIN_TENSOR_BYTES: Final = 24  # length of the name 8, number of dimensions 4, kind 4, offset 8
_MIN_PAIR_BYTES: Final = 13  # length of the key 8, type 4, value 1
_MAX_READS: Final = 2**22  # twice what Gemma's vocabulary of 262 144 takes; bounds time and memory where a damaged length asks for more
_READER_ERRORS: Final = (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError, OSError)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: row-major, [out, in] for a weight matrix. data: its packed values in the memory-mapped file; nothing is read before `expand`."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: npt.NDArray[Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file: metadata by key (numbers, texts, lists of them), tensors by name."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)


@final
class _BoundedReader(GGUFReader):
    """The package's reader, except that reading past the end of the file, or absurdly often, is a ValueError. Three times as fast, too."""

    num_reads = 0

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: None | Literal["I", "S", "<"] = None
    ) -> npt.NDArray[Any]:
        self.num_reads += 1
        if self.num_reads > _MAX_READS:
            raise ValueError(f"more than {_MAX_READS} values in the header")
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(override_order or self.byte_order), int(count), offset)


def read_gguf(path: Path) -> GgufFile:
    """Parse the header and map the data.

    Raises ModelFileMissingError (no such file), ModelFileCorruptError (not GGUF, truncated, damaged), ModelUnsupportedError (a version or
    quantization that noria does not read).
    """
    try:
        _check_header(path)
        with np.errstate(all="raise"):
            reader = _BoundedReader(path)
            metadata = {key: value.contents() for key, value in reader.fields.items()}
    except FileNotFoundError as error:
        raise ModelFileMissingError(f"no model file at {path}") from error
    except _READER_ERRORS as error:
        raise ModelFileCorruptError(f"cannot read {path}: {error}; download it again, or update `gguf` if the file is newer") from error
    tensors = (GgufTensor(t.name, tuple(t.shape.tolist()[::-1]), t.tensor_type, t.data) for t in reader.tensors)
    return GgufFile(path, metadata, {tensor.name: _supported(path, tensor) for tensor in tensors})


def expand(tensor: GgufTensor) -> FloatArray:
    """The values, float32, in the tensor's shape. Raises ModelFileCorruptError if one is NaN or infinite."""
    with np.errstate(all="ignore"):  # a damaged scale may overflow; it is found below
        values: FloatArray = quants.dequantize(tensor.data, tensor.kind)
    if not np.isfinite(values).all():
        raise ModelFileCorruptError(f"tensor {tensor.name!r} has NaN or infinite values; download the model file again")
    return values


def _check_header(path: Path) -> None:
    """Refuse what the file's first bytes and its size already rule out."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size).ljust(_HEADER.size, b"\0")
    magic, version, num_tensors, num_pairs = _HEADER.unpack(header)
    if magic != b"GGUF":
        raise ModelFileCorruptError(f"{path} is not a GGUF file: it starts with {magic!r}, not with b'GGUF'")
    if version not in _VERSIONS:
        raise ModelUnsupportedError(f"{path} has GGUF version {version}; noria reads the little-endian versions 2 and 3")
    size = path.stat().st_size
    if num_tensors * _MIN_TENSOR_BYTES + num_pairs * _MIN_PAIR_BYTES + _HEADER.size > size:
        raise ModelFileCorruptError(f"{path}: {size} bytes cannot hold {num_tensors} tensors and {num_pairs} metadata pairs; download it again")


def _supported(path: Path, tensor: GgufTensor) -> GgufTensor:
    if tensor.kind not in SUPPORTED:
        known = ", ".join(kind.name for kind in SUPPORTED)
        raise ModelUnsupportedError(f"{path}: tensor {tensor.name!r} has quantization {tensor.kind.name}; noria reads {known}")
    return tensor
