"""Places that cannot be written: whatever the system says of them becomes the one error that a user meets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from noria.errors import StorageError


@contextmanager
def storing(place: Path | str) -> Iterator[None]:
    """Around what writes to `place`. Raises StorageError instead of OSError, and of ValueError for what can be no path."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise cannot_write(place, error) from error


def cannot_write(place: Path | str, error: Exception) -> StorageError:
    """The error for a failed write to `place`."""
    why = error.strerror if isinstance(error, OSError) else None
    return StorageError(f"cannot write {str(place)[:200]}: {why or error}; free space there, or name a folder that can be written")
