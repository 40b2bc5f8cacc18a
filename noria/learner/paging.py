"""Where runs wait that hold no slot: their whole training state in host memory, and on disk once that is full.

    put ──▶ host memory ──over the budget: the longest waiting first──▶ <folder>/<number>.page
                 └──────────────── get ◀── size and checksum compared ────────┘

A page's file is raw float32, leaf after leaf: shapes and checksum stay in memory, so that no other file can pass for it. It outlives nothing:
after a crash runs begin again at their committed versions (`adapters/versions.py`), and what lies in the folder is removed.
"""

import logging
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, final

import jax
import numpy as np

from noria.errors import AdapterFileCorruptError
from noria.model.lora import AdapterState, HostAdapter
from noria.observe import log_event

log = logging.getLogger(__name__)


class Page(NamedTuple):
    """One run without a slot. gradient: pending, None where every bit of it is 0."""

    state: AdapterState
    gradient: HostAdapter | None


class _File(NamedTuple):
    """A page on disk: what must be known to read it."""

    path: Path
    shapes: tuple[tuple[int, ...], ...]
    structure: Any
    num_steps: int
    size_bytes: int
    checksum: int


@final
class PageStore:
    """Owner of all pages. One thread. host_bytes: budget of host memory; folder: for files, its alone; None: host memory has to do."""

    def __init__(self, host_bytes: int, folder: Path | None) -> None:
        self._budget_bytes, self._folder = host_bytes, folder
        self._in_memory: OrderedDict[str, Page] = OrderedDict()
        self._on_disk: dict[str, _File] = {}
        self._num_files = 0
        self.host_bytes = 0
        for path in folder.glob("*.page*") if folder is not None else ():
            path.unlink()

    @property
    def disk_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self._on_disk.values())

    def put(self, run_id: str, page: Page) -> None:
        """Keep the page, instead of an earlier one of the run. Its arrays are not copied: nobody may change them."""
        self.drop(run_id)
        self._in_memory[run_id] = page
        self.host_bytes += _size(page)
        while self._folder is not None and self.host_bytes > self._budget_bytes:
            oldest = next(iter(self._in_memory))
            try:
                file = self._write(self._in_memory[oldest], self._folder)
            except OSError as error:  # a full disk costs memory, and no run its state
                log_event(log, logging.ERROR, "page not written", run_id=oldest, error=str(error))
                return
            self._forget(oldest)
            self._on_disk[oldest] = file

    def get(self, run_id: str) -> Page:
        """The run's page, which stays. Raises AdapterFileCorruptError: its file is damaged or gone."""
        page = self._in_memory.get(run_id)
        return page if page is not None else _read(run_id, self._on_disk[run_id])

    def drop(self, run_id: str) -> None:
        """Forget the run's page, if there is one, and remove its file."""
        if run_id in self._in_memory:
            self._forget(run_id)
        if (file := self._on_disk.pop(run_id, None)) is not None:
            file.path.unlink(missing_ok=True)

    def _forget(self, run_id: str) -> None:
        self.host_bytes -= _size(self._in_memory.pop(run_id))

    def _write(self, page: Page, folder: Path) -> _File:
        folder.mkdir(parents=True, exist_ok=True)
        self._num_files += 1
        path = folder / f"{self._num_files}.page"
        aside = path.with_suffix(".page.partial")
        leaves, structure = jax.tree.flatten(_trees(page))
        checksum = 0
        try:
            with aside.open("wb") as out:
                for leaf in map(np.ascontiguousarray, leaves):
                    out.write(leaf)
                    checksum = zlib.crc32(leaf, checksum)
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)
        return _File(path, tuple(leaf.shape for leaf in leaves), structure, page.state.num_steps, _size(page), checksum)


def _trees(page: Page) -> tuple[HostAdapter | None, ...]:
    return (*page.state[:3], page.gradient)


def _size(page: Page) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(_trees(page)))


def _read(run_id: str, file: _File) -> Page:
    try:
        size_bytes, values = file.path.stat().st_size, np.fromfile(file.path, np.float32)
    except OSError as error:
        raise AdapterFileCorruptError(f"the state of run {run_id}, which was paged out, cannot be read: {error}; resume the run") from error
    if size_bytes != file.size_bytes or zlib.crc32(values) != file.checksum:
        raise AdapterFileCorruptError(f"the state of run {run_id}, which was paged out to {file.path}, was changed or damaged; resume the run")
    parts = np.split(values, np.cumsum([int(np.prod(shape)) for shape in file.shapes])[:-1])
    leaves = [part.reshape(shape) for part, shape in zip(parts, file.shapes, strict=True)]
    params, first, second, gradient = jax.tree.unflatten(file.structure, leaves)
    return Page(AdapterState(params, first, second, file.num_steps), gradient)
