"""Reading GGUF: whole files of every quantization, a clear error on damaged ones."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_file import hugging_face_weights, write_llama

from noria.errors import ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.model.gguf_file import SUPPORTED, expand, read_gguf
from noria.model.weights import load_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of an undamaged model file."""
    return write_llama(tmp_path_factory.mktemp("whole") / "model.gguf", kind_of=lambda name: "Q4_1").read_bytes()


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
    expected = {"general.architecture": "llama", **values, "numbers": [1, 2, 3]}
    assert read_gguf(tmp_path / "types.gguf").metadata.items() >= expected.items()


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType)
def test_every_kind_is_expanded_or_refused_by_name(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("w", np.zeros((3, 256 // block_size * block_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if kind in SUPPORTED:
        tensor = read_gguf(tmp_path / "one.gguf").tensors["w"]
        values = expand(tensor)
        assert (values.shape, values.dtype, np.abs(values).max()) == (tensor.shape, np.float32, 0)
    else:
        with pytest.raises(ModelUnsupportedError, match=f"tensor 'w' has quantization {kind.name}; noria reads F32, .*IQ4_XS"):
            read_gguf(tmp_path / "one.gguf")


@pytest.mark.parametrize("kind", [5, 7, 8])  # int32, bool, text
@pytest.mark.parametrize("length", [2**17, 2**40, 2**64 - 1])
def test_an_array_longer_than_the_file_is_refused_at_once(kind: int, length: int, tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, kind, length) + bytes(2**16))
    with pytest.raises(ModelFileCorruptError, match="cannot read"):
        read_gguf(path)


def test_a_file_of_nothing_but_values_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noria.model.gguf_file._MAX_READS", 1000)
    path = tmp_path / "long.gguf"
    path.write_bytes(struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 0, 2000) + bytes(2000))
    with pytest.raises(ModelFileCorruptError, match="more than 1000 values"):
        read_gguf(path)


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    path.write_bytes(struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 100_000)
    with pytest.raises(ModelFileCorruptError, match="cannot read"):
        read_gguf(path)


def test_more_tensors_than_the_file_can_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 1) + bytes(100))
    with pytest.raises(ModelFileCorruptError, match="124 bytes cannot hold 9223372036854775808 tensors"):
        read_gguf(path)


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
    for start in (b"", b"GGUF", b"GGUF\x03", b"GGUF" + struct.pack("<IQ", 3, 1)):
        other.write_bytes(start)
        with pytest.raises(ModelFileCorruptError, match="cut off"):
            read_gguf(other)
    with pytest.raises(ModelFileCorruptError, match="cannot read"):
        read_gguf(tmp_path)


@pytest.mark.parametrize("version", [9, 3 << 24])
def test_another_version_or_byte_order_of_the_format_is_refused(version: int, tmp_path: Path) -> None:
    path = tmp_path / "future.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelUnsupportedError, match=f"version {version}; .*little-endian"):
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
