"""GGUF model files, read with the `gguf` package, and one named error for each thing that can be wrong with one.

Stricter than its reader, which takes fewer bytes than it asks for at the end of a file, so that a damaged length is met late or never, and which
gets quantized weights of big-endian files wrong. Deliberately not here: what the tensors mean (`model/weights.py`), and writing.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, quants

from noria.errors import ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.types import FloatArray

# The package has a class of the same name for each kind that it expands, but for the two plain ones.
SUPPORTED: Final = tuple(kind for kind in GGMLQuantizationType if kind.name in ("F32", "F16") or hasattr(quants, kind.name))
_HEADER: Final = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata pairs
_MIN_ENTRY_BYTES: Final = 13  # of a metadata pair: length of the key 8, type 4, value 1; a tensor's entry is longer
_MAX_READS: Final = 2**22  # twice what Gemma's vocabulary of 262 144 takes; bounds time and memory where a damaged length asks for more


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: row-major, [out, in] for a weight matrix. data: its packed values in the memory-mapped file, unread before `expand`."""

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
    """The package's reader, except that reading past the end of the file, or absurdly often, is a ValueError. Two to three times as fast, too."""

    num_reads = 0

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        self.num_reads += 1
        if self.num_reads > _MAX_READS:
            raise ValueError(f"more than {_MAX_READS} values in the header")
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(override_order or self.byte_order), int(count), offset)


def read_gguf(path: Path) -> GgufFile:
    """Parse the header and map the data.

    Raises ModelFileMissingError, ModelFileCorruptError (not GGUF, truncated, damaged), ModelUnsupportedError (another version or quantization).
    """
    try:
        _check_header(path)
        with np.errstate(all="raise"):  # an offset that overflows
            reader = _BoundedReader(path)
            metadata = {key: value.contents() for key, value in reader.fields.items()}
    except FileNotFoundError as error:
        raise ModelFileMissingError(f"no model file at {path}") from error
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError, OSError) as error:
        raise ModelFileCorruptError(f"cannot read {path}: {error}; download it again, or update `gguf` if the file is newer") from error
    for tensor in reader.tensors:
        if tensor.tensor_type not in SUPPORTED:
            known = ", ".join(kind.name for kind in SUPPORTED)
            raise ModelUnsupportedError(f"{path}: tensor {tensor.name!r} has quantization {tensor.tensor_type.name}; noria reads {known}")
    return GgufFile(path, metadata, {t.name: GgufTensor(t.name, tuple(t.shape.tolist()[::-1]), t.tensor_type, t.data) for t in reader.tensors})


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
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(b"GGUF"):
        raise ModelFileCorruptError(f"{path} is not a GGUF file, or is cut off: it starts with {header!r}; download it again")
    _, version, num_tensors, num_pairs = _HEADER.unpack(header)
    if version not in (2, 3):
        raise ModelUnsupportedError(f"{path} has GGUF version {version}; noria reads 2 and 3, little-endian")
    if (num_tensors + num_pairs) * _MIN_ENTRY_BYTES > (size := path.stat().st_size):
        raise ModelFileCorruptError(f"{path}: {size} bytes cannot hold {num_tensors} tensors and {num_pairs} metadata pairs; download it again")
