"""Committed versions on disk: round trip bit for bit, damage is found, nothing half-written counts."""

import numpy as np
import pytest
from learner_builders import nonzero_state, same_bytes, spec

from noria.adapters.versions import VersionFiles
from noria.errors import AdapterFileCorruptError, UnknownVersionError
from noria.model.lora import checksum


def written(tmp_path, version=3, rank=4):
    files = VersionFiles(tmp_path)
    state = nonzero_state(1, spec("run", rank=rank))._replace(num_steps=version)
    return files, state, files.write("run", version, state, rank)


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_a_written_version_loads_bit_for_bit_into_its_rank_class(tmp_path, rank):
    files, state, record = written(tmp_path, rank=rank)
    assert same_bytes(files.load(record, max_rank=8), state)
    assert files.load(record, max_rank=8).num_steps == 3


def test_the_checksum_is_the_same_in_every_rank_class(tmp_path):
    files, _, record = written(tmp_path)
    assert int(checksum(files.load(record, max_rank=16).params)) == record.checksum


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap"])
def test_a_damaged_adapter_file_is_found_by_its_checksum(tmp_path, damage):
    files, state, record = written(tmp_path)
    path = tmp_path / record.path / "adapter.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-100] ^= 1
    elif damage == "truncate":
        data = data[:-8]
    else:
        q, k = state.params["a"]["q"].copy(), state.params["a"]["q"][::-1].copy()
        assert not np.array_equal(q, k)
        state.params["a"]["q"][:] = k
        files.write("run", 3, state, 4)
        data = bytearray(path.read_bytes())
    path.write_bytes(bytes(data))
    with pytest.raises(AdapterFileCorruptError):
        files.load(record, max_rank=8)


def test_a_version_that_is_not_kept_is_unknown(tmp_path):
    files, state, record = written(tmp_path)
    files.write("run", 4, state, 4)
    files.keep_only("run", [4])
    with pytest.raises(UnknownVersionError, match="version 3"):
        files.load(record, max_rank=8)


def test_what_a_crash_left_aside_is_removed_and_never_loaded(tmp_path):
    files, _, record = written(tmp_path)
    aside = tmp_path / "run" / ".4.partial"
    aside.mkdir()
    (aside / "adapter.safetensors").write_bytes(b"half")
    (tmp_path / "run" / "4").mkdir()
    files.keep_only("run", [3])
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["3"]
    files.load(record, max_rank=8)
