"""Files for people, whole or not at all: written aside, synced, then renamed over what was there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from noria.storage import cannot_write


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write into: it becomes `path` when the block has ended well, and is removed when it has not.

    Raises StorageError if the place cannot be written to.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):  # where a file lies in a folder's place there is nothing to remove
            part.unlink(missing_ok=True)


def write_aside(path: Path, content: bytes) -> Path:
    """Write a whole file; its path. Raises StorageError if the place cannot be written to."""
    with aside(path) as part:
        part.write_bytes(content)
    return path
