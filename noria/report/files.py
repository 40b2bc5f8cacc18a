"""Files for people, whole or not at all: written aside, synced, then renamed over what was there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noria.errors import ConfigError


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write into: it becomes `path` when the block has ended well, and is removed when it has not.

    Raises ConfigError if the place cannot be written to.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def write_aside(path: Path, content: bytes) -> Path:
    """Write a whole file; its path. Raises ConfigError if the place cannot be written to."""
    with aside(path) as part:
        part.write_bytes(content)
    return path
