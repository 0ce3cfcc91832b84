"""A lock on a folder, held while its contents are moved or deleted, so that no writer starts meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sonde.errors import RunLockedError
from sonde.schema.layout import LOCK_FILE


@contextmanager
def held(folder: Path, refusal: str) -> Iterator[None]:
    """Hold the lock inside the block; if another process has it already, raise RunLockedError with this message."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    path = folder / LOCK_FILE
    if not path.is_file() or path.is_symlink():
        yield
        return
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLockedError(refusal) from None
        yield
