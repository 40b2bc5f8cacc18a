"""Committed adapter versions on disk: immutable folders, written aside, fsynced and renamed.

    <root>/<run_id>/<version>/adapter.safetensors    parameters at the run's own rank
                              moments.safetensors    AdamW moments, same shapes
Both carry run, version and the checksum of their own tensors in their metadata. A folder exists whole or not at all. It counts only once the
database says so (the service's commit), with both checksums, which every load recomputes. `keep_only` removes what a crash left between the rename
and that commit, and superseded versions.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from noria.errors import AdapterFileCorruptError, StateConflictError, UnknownVersionError
from noria.model.durable import whole_folder
from noria.model.lora import MODULES, TOP_MODULES, AdapterState, HostAdapter, checksum, resize_rank
from noria.types import AdapterVersion, FloatArray

ADAPTER, MOMENTS = "adapter.safetensors", "moments.safetensors"


@final
class VersionFiles:
    """The folder of committed versions. Any thread may call it, one call at a time per run."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, run_id: str, version: int, state: AdapterState, rank: int) -> AdapterVersion:
        """Store a state durably, its folders included; returns its record. An uncommitted folder of the same version is replaced."""
        assert state.num_steps == version, "a version is the number of its optimizer steps"
        target = self._root / run_id / str(version)
        params, first, second = (resize_rank(tree, rank) for tree in state[:3])
        record = AdapterVersion(run_id, version, checksum(params), _moments_checksum(first, second), str(target.relative_to(self._root)))
        with whole_folder(target) as aside:
            save_file(_flatten({"": params}), aside / ADAPTER, _metadata(record, record.checksum))
            save_file(_flatten({"first.": first, "second.": second}), aside / MOMENTS, _metadata(record, record.moments_checksum))
        return record

    def load(self, record: AdapterVersion, width: int) -> AdapterState:
        """A committed state, padded to the width of its run's rank class, with the top modules that it was committed with.

        Raises UnknownVersionError if it is no longer kept, StateConflictError if its rank is above the width, AdapterFileCorruptError if a file is
        unreadable or anything in it is not what was committed: run, version, tensors, their shapes, types and bits.
        """
        folder = self._root / record.path
        if not folder.is_dir():
            raise UnknownVersionError(f"version {record.version} of run {record.run_id} is not on disk ({folder})")
        params = _unflatten(_read(folder / ADAPTER, ("",), _metadata(record, record.checksum)), "")
        moments = _read(folder / MOMENTS, ("first.", "second."), _metadata(record, record.moments_checksum))
        first, second = _unflatten(moments, "first."), _unflatten(moments, "second.")
        rank = _common_rank(folder, (params, first, second))
        if rank > width:
            raise StateConflictError(f"version {record.version} of run {record.run_id} has rank {rank}, which does not fit in a width of {width}")
        _compare(folder / ADAPTER, checksum(params), record.checksum)
        _compare(folder / MOMENTS, _moments_checksum(first, second), record.moments_checksum)
        return AdapterState(resize_rank(params, width), resize_rank(first, width), resize_rank(second, width), record.version)

    def keep_only(self, run_id: str, versions: Iterable[int]) -> None:
        """Remove every version of the run that is not named: superseded ones, and what a crash left uncommitted."""
        names = {str(version) for version in versions}
        folder = self._root / run_id
        for child in folder.iterdir() if folder.is_dir() else ():
            if child.name not in names:
                shutil.rmtree(child)


def _metadata(record: AdapterVersion, number: int) -> dict[str, str]:
    """One entry: safetensors writes several in an order that differs from time to time, and equal versions are equal files."""
    return {"noria": json.dumps({"run_id": record.run_id, "version": record.version, "checksum": number})}


def _moments_checksum(first: HostAdapter, second: HostAdapter) -> int:
    """Of both moments; the odd factor tells them apart, so that swapped ones are seen."""
    return (checksum(first) + 3 * checksum(second)) % 2**32


def _flatten(trees: dict[str, HostAdapter]) -> dict[str, FloatArray]:
    return {
        f"{prefix}{side}.{module}": np.ascontiguousarray(leaf)
        for prefix, tree in trees.items()
        for side, leaves in tree.items()
        for module, leaf in leaves.items()
    }


def _unflatten(tensors: dict[str, FloatArray], prefix: str) -> HostAdapter:
    modules = [module for module in (*MODULES, *TOP_MODULES) if f"{prefix}a.{module}" in tensors]
    return {side: {module: tensors[f"{prefix}{side}.{module}"] for module in modules} for side in ("a", "b")}


def _read(path: Path, prefixes: tuple[str, ...], metadata: dict[str, str]) -> dict[str, FloatArray]:
    """The tensors of a file that holds exactly the adapters named by `prefixes`, in float32, with exactly this metadata."""

    def names_of(*modules: str) -> set[str]:
        return {f"{prefix}{side}.{module}" for prefix in prefixes for side in ("a", "b") for module in modules}

    try:
        with safe_open(path, framework="numpy") as file:
            found = file.metadata()
            if found != metadata:
                raise AdapterFileCorruptError(f"{path} says that it is {found}, committed was {metadata}; it is another file, or damaged")
            names = set(file.keys())
            expected = names_of(*MODULES, *(module for module in TOP_MODULES if names & names_of(module)))
            if names != expected:
                raise AdapterFileCorruptError(f"{path} lacks tensors {sorted(expected - names)} and has unknown ones {sorted(names - expected)}")
            kinds = {file.get_slice(name).get_dtype() for name in names}
            if kinds != {"F32"}:
                raise AdapterFileCorruptError(f"{path} has tensors of type {sorted(kinds)}, expected F32 only")
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise AdapterFileCorruptError(f"cannot read {path}: {error}") from error


def _common_rank(folder: Path, trees: tuple[HostAdapter, ...]) -> int:
    """The rank that all leaves share. Raises AdapterFileCorruptError: leaves that do not belong together."""
    params, *moments = [{f"{side}.{module}": leaf.shape for side in tree for module, leaf in tree[side].items()} for tree in trees]
    ranks = {shape[2:] if name.startswith("a.") else shape[1:2] for name, shape in params.items()}
    if {len(shape) for shape in params.values()} != {3} or len(ranks) != 1 or any(shapes != params for shapes in moments):
        raise AdapterFileCorruptError(f"{folder}: shapes that do not belong together: adapter {params}, moments {moments}")
    return int(ranks.pop()[0])


def _compare(path: Path, found: int, committed: int) -> None:
    if found != committed:
        raise AdapterFileCorruptError(f"{path}: checksum {found}, committed {committed}; the file was changed or damaged")
