"""Reading safetensors: every dtype of weights as float32, and a clear error on damaged files."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from noria.errors import ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.model.safetensors_file import expand, read_safetensors

VALUES = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


def file_of(header: object, values: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_are_those_of_the_dtype(dtype: type, tmp_path: Path) -> None:
    stored = VALUES.astype(dtype)
    name = {np.float32: "F32", np.float16: "F16", ml_dtypes.bfloat16: "BF16"}[dtype]
    entry = {"dtype": name, "shape": [3, 5], "data_offsets": [0, stored.nbytes]}
    (tmp_path / "a.safetensors").write_bytes(file_of({"__metadata__": {"format": "pt"}, "w": entry}, stored.tobytes()))
    tensors = read_safetensors(tmp_path / "a.safetensors")
    values = expand(tensors["w"])
    assert (list(tensors), tensors["w"].shape, values.dtype) == (["w"], (3, 5), np.float32)
    np.testing.assert_array_equal(values, stored.astype(np.float32))


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    tensors = {"a": VALUES, "b.c": VALUES[0].astype(np.float16), "scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.float32)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    read = {name: expand(tensor) for name, tensor in read_safetensors(tmp_path / "a.safetensors").items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_that_are_not_finite_are_refused(value: float, dtype: type, tmp_path: Path) -> None:
    save_file({"w": np.array([1, value], dtype)}, tmp_path / "a.safetensors")
    tensor = read_safetensors(tmp_path / "a.safetensors")["w"]
    with pytest.raises(ModelFileCorruptError, match="'w' has NaN or infinite"):
        expand(tensor)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "F64", "I64"])
def test_other_dtypes_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(file_of({"w": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}, bytes(8)))
    with pytest.raises(ModelUnsupportedError, match=f"'w' has dtype {dtype}; noria reads F32, F16, BF16"):
        read_safetensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00\x00",
        struct.pack("<Q", 0),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        file_of([]),
        file_of({"w": 3}),
        file_of({"w": {"dtype": "F32", "shape": [1]}}),
        file_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(8)),
        file_of({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
        file_of({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4)),
        file_of({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        file_of({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)),
        file_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)),
        file_of({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    ],
)
def test_damaged_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileCorruptError, match=r"a\.safetensors"):
        read_safetensors(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissingError, match=r"no model file at .*a\.safetensors"):
        read_safetensors(tmp_path / "a.safetensors")
    with pytest.raises(ModelFileCorruptError, match="cannot read"):
        read_safetensors(tmp_path)


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 200))
def test_a_cut_file_is_always_refused(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = save({"a": VALUES, "b": VALUES})
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    path.write_bytes(whole[: len(whole) - cut])
    with pytest.raises(ModelFileCorruptError):
        read_safetensors(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused_with_an_error_of_ours(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    damaged = bytearray(save({"a": VALUES, "b": VALUES}))
    header = 8 + struct.unpack("<Q", damaged[:8])[0]
    for position in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=3)):
        damaged[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damaged)
    try:
        tensors = read_safetensors(path)
    except (ModelFileCorruptError, ModelUnsupportedError):
        return
    for tensor in tensors.values():
        assert expand(tensor).shape == tensor.shape
