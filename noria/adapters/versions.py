"""Committed adapter versions on disk: immutable folders, written aside, fsynced and renamed.

    <root>/<run_id>/<version>/adapter.safetensors    parameters at the run's own rank
                              moments.safetensors    AdamW moments, same shapes
Both carry run, version, step count and checksum in their metadata. A folder exists whole or not at all. It counts only once the database says
so (the service's commit); `keep_only` removes what a crash left between the rename and that commit, and superseded versions.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from noria.errors import AdapterFileCorruptError, UnknownVersionError
from noria.model.lora import AdapterState, HostAdapter, checksum, resize_rank
from noria.types import AdapterVersion, FloatArray


@final
class VersionFiles:
    """The folder of committed versions. Any thread may call it, one call at a time per run."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, run_id: str, version: int, state: AdapterState, rank: int) -> AdapterVersion:
        """Store a state durably; returns its record. An uncommitted folder of the same version is replaced."""
        target = self._root / run_id / str(version)
        aside = target.with_name(f".{version}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        number = int(checksum(state.params))
        metadata = {"run_id": run_id, "version": str(version), "num_steps": str(state.num_steps), "checksum": str(number)}
        _save(aside / "adapter.safetensors", _flatten({"": resize_rank(state.params, rank)}), metadata)
        moments = {"first.": resize_rank(state.first_moment, rank), "second.": resize_rank(state.second_moment, rank)}
        _save(aside / "moments.safetensors", _flatten(moments), metadata)
        _fsync(aside)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        _fsync(target.parent)
        return AdapterVersion(run_id, version, number, str(target.relative_to(self._root)))

    def load(self, record: AdapterVersion, max_rank: int) -> AdapterState:
        """A committed state, padded to the rank class.

        Raises UnknownVersionError if it is no longer kept, AdapterFileCorruptError if a file is unreadable or not what was committed.
        """
        folder = self._root / record.path
        if not folder.is_dir():
            raise UnknownVersionError(f"version {record.version} of run {record.run_id} is not on disk ({folder})")
        params, metadata = _read(folder / "adapter.safetensors")
        moments, _ = _read(folder / "moments.safetensors")
        trees = [_unflatten(tensors, prefix) for tensors, prefix in ((params, ""), (moments, "first."), (moments, "second."))]
        weights, first, second = (resize_rank(tree, max_rank) for tree in trees)
        state = AdapterState(weights, first, second, int(metadata["num_steps"]))
        found = int(checksum(state.params))
        if found != record.checksum:
            raise AdapterFileCorruptError(f"{folder}: checksum {found}, committed {record.checksum}; the file was changed or damaged")
        return state

    def keep_only(self, run_id: str, versions: Iterable[int]) -> None:
        """Remove every version of the run that is not named: superseded ones, and what a crash left uncommitted."""
        names = {str(version) for version in versions}
        folder = self._root / run_id
        for child in folder.iterdir() if folder.is_dir() else ():
            if child.name not in names:
                shutil.rmtree(child)


def _flatten(trees: dict[str, HostAdapter]) -> dict[str, FloatArray]:
    return {f"{prefix}{side}.{module}": leaf for prefix, tree in trees.items() for side, leaves in tree.items() for module, leaf in leaves.items()}


def _unflatten(tensors: dict[str, FloatArray], prefix: str) -> HostAdapter:
    tree: HostAdapter = {"a": {}, "b": {}}
    for name, leaf in tensors.items():
        if name.startswith(prefix):
            side, module = name.removeprefix(prefix).split(".")
            tree[side][module] = leaf
    return tree


def _save(path: Path, tensors: dict[str, FloatArray], metadata: dict[str, str]) -> None:
    save_file({name: np.ascontiguousarray(leaf) for name, leaf in tensors.items()}, path, metadata=metadata)
    _fsync(path)


def _read(path: Path) -> tuple[dict[str, FloatArray], dict[str, str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise AdapterFileCorruptError(f"cannot read {path}: {error}") from error


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
