"""Folders on disk that exist whole or not at all, whatever crashes or loses power in between: written aside, fsynced, renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from noria.storage import cannot_write


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write files into, which takes the place of `target` when the block ends, durably: its files, itself, and its parents' entries.

    If the block raises, `target` is as it was and nothing is left. One writer per target at a time.
    Raises StorageError if the place cannot be written, or the block fails to write (no space left).
    """
    aside = target.with_name(f".{target.name}.partial")
    try:
        _make_durable(target.parent)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        for path in (*aside.iterdir(), aside):
            _fsync(path)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        _fsync(target.parent)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise cannot_write(target, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _make_durable(folder: Path) -> None:
    """Create a folder with its parents so that a power cut cannot take them back: each one's entry is synced in the folder above it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _fsync(path.parent)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
