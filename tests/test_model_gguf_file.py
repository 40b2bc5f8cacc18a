"""Reading GGUF: equal to the reference package on whole files, a clear error on damaged ones."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_file import KINDS, hugging_face_weights, metadata, write_gguf, write_llama

from noria.errors import ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.model.gguf_file import expand, read_gguf
from noria.model.weights import load_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of an undamaged model file."""
    return write_llama(tmp_path_factory.mktemp("whole") / "model.gguf", kind_of=lambda name: "Q4_1").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantization_expands_to_the_bits_of_the_reference_package(kind: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=(24, 96)).astype(np.float32)
    tensor = read_gguf(write_gguf(tmp_path / "one.gguf", metadata(), {"w": weight}, lambda name: kind)).tensors["w"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, KINDS[kind]), KINDS[kind])
    order = np.random.default_rng(2).permutation(24)
    plain, turned, reordered = np.empty((24, 96), np.float32), np.empty((96, 24), np.float32), np.empty((96, 24), np.float32)
    expand(tensor, plain)
    expand(tensor, turned, transpose=True)
    expand(tensor, reordered, transpose=True, row_order=order)
    np.testing.assert_array_equal(plain, expected)
    np.testing.assert_array_equal(turned, expected.T)
    np.testing.assert_array_equal(reordered, expected[order].T)


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    values = {"uint8": 7, "int8": -7, "uint16": 700, "int16": -700, "uint32": 70_000, "int32": -70_000, "uint64": 2**40, "int64": -(2**40)}
    values |= {"float32": 0.5, "float64": 0.1, "bool": True, "string": "à la carte", "array": ["a", ""]}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert dict(read_gguf(tmp_path / "types.gguf").metadata) == {"general.architecture": "llama", **values, "numbers": [1, 2, 3]}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_truncated_file_is_always_refused(whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 33))])  # the last 32 bytes may be padding
    with pytest.raises(ModelFileCorruptError):
        load_gguf(path, "cut")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_loads_or_is_refused_with_an_error_of_ours(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(whole)
    header = whole.index(b"output_norm.weight") + 64
    for position in data.draw(st.lists(st.integers(0, header), min_size=1, max_size=4)):
        damaged[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        loaded = load_gguf(path, "damaged")
    except (ModelFileCorruptError, ModelUnsupportedError):
        return
    assert all(np.isfinite(w).all() for w in loaded.params["layers"].values())


def test_what_is_not_a_gguf_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFileCorruptError, match="not a GGUF file"):
        read_gguf(other)
    with pytest.raises(ModelFileMissingError, match="no model file"):
        read_gguf(tmp_path / "absent.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelFileCorruptError, match="cannot map"):
        read_gguf(tmp_path / "empty.gguf")


def test_another_version_of_the_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "future.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(ModelUnsupportedError, match="version 9"):
        read_gguf(path)


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    weights["blk.1.attn_norm.weight"][3] = np.nan
    with pytest.raises(ModelFileCorruptError, match=r"blk\.1\.attn_norm\.weight"):
        load_gguf(write_llama(tmp_path / "nan.gguf", tensors=weights), "nan")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_quantization_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    weights["blk.0.ffn_up.weight"][0, 0] = 1e30  # overflows the block's float16 scale
    path = write_llama(tmp_path / "inf.gguf", tensors=weights, kind_of=lambda name: "Q8_0")
    with pytest.raises(ModelFileCorruptError, match=r"blk\.0\.ffn_up\.weight"):
        load_gguf(path, "inf")
