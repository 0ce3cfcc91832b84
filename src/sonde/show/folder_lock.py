"""Hold a folder's lock while its contents are moved or removed, so that no writer begins meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sonde.errors import RunLockedError
from sonde.schema.layout import LOCK_FILE


@contextmanager
def held(folder: Path, refusal: str) -> Iterator[None]:
    """Inside, no other process holds the lock; one that does already is not disturbed: a RunLockedError says why."""
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
