"""Committed versions on disk: round trip bit for bit, any damage is found, nothing half-written or half-synced counts."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from learner_builders import nonzero_state, same_bytes, spec, tiny
from safetensors import safe_open
from safetensors.numpy import save_file

from noria.adapters.versions import VersionFiles
from noria.errors import AdapterFileCorruptError, StateConflictError, StorageError, UnknownVersionError
from noria.model.lora import checksum, host_shapes

ADAPTER, MOMENTS = "adapter.safetensors", "moments.safetensors"


def a_state(seed=1, rank=4, version=3):
    """A run in the middle of its training: parameters and both moments are not zero."""
    run_spec = spec("run", rank=rank)
    trees = [nonzero_state(seed + n, run_spec).params for n in range(3)]
    return nonzero_state(seed, run_spec)._replace(params=trees[0], first_moment=trees[1], second_moment=trees[2], num_steps=version)


def written(tmp_path, version=3, rank=4):
    files, state = VersionFiles(tmp_path), a_state(rank=rank, version=version)
    return files, state, files.write("run", version, state, rank)


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_a_written_version_loads_bit_for_bit_into_its_rank_class(tmp_path, rank):
    files, state, record = written(tmp_path, rank=rank)
    assert same_bytes(files.load(record, width=8), state)
    assert files.load(record, width=8).num_steps == 3


def test_equal_states_are_equal_files(tmp_path):
    for folder in "abcdef":
        written(tmp_path / folder)
    for name in (ADAPTER, MOMENTS):
        assert len({(tmp_path / folder / "run" / "3" / name).read_bytes() for folder in "abcdef"}) == 1


def test_the_checksum_is_the_same_in_every_rank_class(tmp_path):
    files, _, record = written(tmp_path)
    assert checksum(files.load(record, width=16).params) == record.checksum


def test_a_rank_above_the_width_is_refused_by_name(tmp_path):
    files, _, record = written(tmp_path, rank=8)
    with pytest.raises(StateConflictError, match="version 3 of run run has rank 8, which does not fit in a width of 4"):
        files.load(record, width=4)


def with_top(module, state, rank, width):
    """The state with a top module too, in the parameters and in both moments."""
    shapes, rng = host_shapes(tiny()[0], width), np.random.default_rng(3)
    top = {side: rng.normal(size=shapes[side][module]).astype(np.float32) for side in "ab"}
    top["a"][:, :, rank:] = top["b"][:, rank:] = 0
    trees = [{side: leaves | {module: top[side] * (n + 1)} for side, leaves in tree.items()} for n, tree in enumerate(state[:3])]
    return state._replace(params=trees[0], first_moment=trees[1], second_moment=trees[2])


@pytest.mark.parametrize("tops", [("head",), ("value",), ("value", "head")])
def test_top_modules_are_stored_with_the_layers(tmp_path, tops):
    files, state = VersionFiles(tmp_path), a_state()
    for module in tops:
        state = with_top(module, state, 4, 8)
    record = files.write("run", 3, state, 4)
    assert same_bytes(files.load(record, width=8), state)
    assert record.checksum != files.write("other", 3, a_state(), 4).checksum
    rewrite(tmp_path / record.path / ADAPTER, lambda tensors, metadata: tensors.pop(f"b.{tops[0]}"))
    with pytest.raises(AdapterFileCorruptError, match=rf"lacks tensors \['b\.{tops[0]}'\]"):
        files.load(record, width=8)


def test_a_write_that_fails_leaves_the_version_as_it_was(tmp_path, monkeypatch):
    files, state, record = written(tmp_path)

    def no_space(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("noria.adapters.versions.save_file", no_space)
    with pytest.raises(StorageError, match="no space"):
        files.write("run", 3, a_state(seed=5), 4)
    assert same_bytes(files.load(record, width=8), state)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["3"]


@pytest.mark.parametrize("name", [ADAPTER, MOMENTS])
def test_one_flipped_bit_anywhere_in_a_file_is_found(tmp_path, name):
    files, _, record = written(tmp_path, rank=1)
    path = tmp_path / record.path / name
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    header = int.from_bytes(whole[:8], "little") + 8
    places = np.concatenate([np.arange(header), rng.integers(header, len(whole), 300)])
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with pytest.raises(AdapterFileCorruptError):
            files.load(record, width=8)
    path.write_bytes(whole)
    files.load(record, width=8)


def rewrite(path, change):
    """Save the file again, well-formed, after `change(tensors, metadata)`."""
    with safe_open(path, framework="numpy") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118 (not a dict)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata or None)


def claim(metadata, **changes):
    metadata["noria"] = json.dumps(json.loads(metadata["noria"]) | changes)


def swap(tensors, left, right):
    tensors[left], tensors[right] = tensors[right], tensors[left]


def swap_moments(tensors):
    for name in [name.removeprefix("first.") for name in tensors if name.startswith("first.")]:
        swap(tensors, f"first.{name}", f"second.{name}")


CHANGES = {
    "a tensor is missing": lambda t, m: t.pop(min(t)),
    "a tensor is too many": lambda t, m: t.update(extra=t[min(t)]),
    "another dtype of the same bits": lambda t, m: t.update({min(t): t[min(t)].view(np.int32)}),
    "a wider dtype": lambda t, m: t.update({min(t): t[min(t)].astype(np.float64)}),
    "another shape of the same bytes": lambda t, m: t.update({min(t): t[min(t)].reshape(-1)}),
    "a layer is missing": lambda t, m: t.update({name: leaf[:1] for name, leaf in t.items()}),
    "another run": lambda t, m: claim(m, run_id="other"),
    "another version": lambda t, m: claim(m, version=4),
    "another checksum": lambda t, m: claim(m, checksum=json.loads(m["noria"])["checksum"] ^ 1),
    "no metadata": lambda t, m: m.clear(),
    "the layers are swapped": lambda t, m: t.update({name: leaf[::-1].copy() for name, leaf in t.items()}),
    "a value is not a number": lambda t, m: t[min(t)].__setitem__((0, 0, 0), np.nan),
}


@pytest.mark.parametrize("name", [ADAPTER, MOMENTS])
@pytest.mark.parametrize("change", CHANGES)
def test_a_well_formed_file_that_is_not_what_was_committed_is_refused(tmp_path, name, change):
    files, _, record = written(tmp_path)
    rewrite(tmp_path / record.path / name, CHANGES[change])
    with pytest.raises(AdapterFileCorruptError):
        files.load(record, width=8)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: swap_moments(t),
        lambda t: swap(t, "first.a.q", "second.a.q"),
        lambda t: swap(t, "first.a.gate", "first.a.up"),
        lambda t: t["second.b.down"].fill(0),
        lambda t: [t.pop(name) for name in list(t) if name.startswith("second.")],
    ],
)
def test_moments_that_changed_places_are_found(tmp_path, change):
    files, _, record = written(tmp_path)
    rewrite(tmp_path / record.path / MOMENTS, lambda tensors, metadata: change(tensors))
    with pytest.raises(AdapterFileCorruptError):
        files.load(record, width=8)


@pytest.mark.parametrize("name", [ADAPTER, MOMENTS])
def test_a_file_of_another_version_or_run_or_none_in_its_place_is_refused(tmp_path, name):
    files, _, record = written(tmp_path)
    path = tmp_path / record.path / name
    for other in (files.write("run", 4, a_state(9, version=4), 4), files.write("stranger", 3, a_state(), 4)):
        path.write_bytes((tmp_path / other.path / name).read_bytes())
        with pytest.raises(AdapterFileCorruptError, match="another file"):
            files.load(record, width=8)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(AdapterFileCorruptError, match="cannot read"):
        files.load(record, width=8)
    path.unlink()
    with pytest.raises(AdapterFileCorruptError, match="cannot read"):
        files.load(record, width=8)


def test_a_version_written_twice_is_what_its_newest_record_says(tmp_path):
    files, _, record = written(tmp_path)
    again = files.write("run", 3, a_state(seed=5), 4)
    assert same_bytes(files.load(again, width=8), a_state(seed=5))
    for stale in (record, replace(again, moments_checksum=record.moments_checksum), replace(again, checksum=record.checksum)):
        with pytest.raises(AdapterFileCorruptError):
            files.load(stale, width=8)


def test_a_version_that_is_not_kept_is_unknown(tmp_path):
    files, state, record = written(tmp_path)
    files.write("run", 4, state._replace(num_steps=4), 4)
    files.keep_only("run", [4])
    with pytest.raises(UnknownVersionError, match="version 3"):
        files.load(record, width=8)


def test_what_a_crash_left_aside_is_removed_and_never_loaded(tmp_path):
    files, state, record = written(tmp_path)
    aside = tmp_path / "run" / ".4.partial"
    aside.mkdir()
    (aside / ADAPTER).write_bytes(b"half")
    (tmp_path / "run" / "4").mkdir()
    fourth = files.write("run", 4, state._replace(num_steps=4), 4)
    assert same_bytes(files.load(fourth, width=8), state._replace(num_steps=4))
    aside.mkdir()
    files.keep_only("run", [3])
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["3"]
    files.load(record, width=8)


def test_everything_that_write_created_is_synced_before_it_returns(tmp_path, monkeypatch):
    """A power cut after the commit must find the files and every folder entry on the way to them."""
    synced, fsync = [], os.fsync

    def record_and_sync(handle):
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record_and_sync)
    root = tmp_path / "state" / "adapters"
    record = VersionFiles(root).write("run", 0, a_state(version=0), 4)
    folder = root / record.path
    needed = [tmp_path, tmp_path / "state", root, root / "run", folder, folder / ADAPTER, folder / MOMENTS]
    assert {path: path.stat().st_ino in synced for path in needed} == dict.fromkeys(needed, True)
    assert synced[-1] == (root / "run").stat().st_ino, "the rename itself, last"
