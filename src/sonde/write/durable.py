"""Atomic file writes: after a power loss a file is either the old one or the new one. Knows no format."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Self

TMP_SUFFIX = ".tmp"
_LAST_STANDARD = 2
"""stdin, stdout and stderr."""


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte; a full disk shows as a short write first and as an error only on the next one."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        view = view[written:]


def open_file(path: Path, flags: int) -> int:
    """A descriptor other than the first three: if a program runs with stderr closed, anything a library prints there
    would otherwise go into our file."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    if fd > _LAST_STANDARD:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD + 1)
    finally:
        os.close(fd)


class DurableFile:
    """A file that appears under its name only when it is complete: tmp + fsync + rename. `sha256` is of the written
    bytes.

    with DurableFile(path) as file:
        file.write(data)
    """

    closed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sha256 = hashlib.sha256()
        self._tmp = path.with_name(path.name + TMP_SUFFIX)
        self.fd = open_file(self._tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)

    def write(self, data: bytes | memoryview) -> int:
        write_all(self.fd, data)
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None:
        """Unbuffered."""

    def finish(self) -> int:
        """Rename the file into place and return its open descriptor. The folder entry still needs `sync_folder`."""
        os.fsync(self.fd)
        os.replace(self._tmp, self.path)  # noqa: PTH105  all system calls here go through `os`, where a test can break them
        fd, self.fd = self.fd, -1
        return fd

    def discard(self) -> None:
        """An incomplete file would keep the space that was missing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(self._tmp)  # noqa: PTH108

    def __enter__(self) -> Self:
        return self

    def __exit__(self, type: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.discard()
            return
        os.close(_finished(self))
        sync_folder(self.path.parent)


def create_durably(path: Path, data: bytes) -> int:
    """Write a complete file and return its open descriptor. The folder entry still needs `sync_folder`."""
    file = DurableFile(path)
    try:
        file.write(data)
    except BaseException:
        file.discard()
        raise
    return _finished(file)


def write_durably(path: Path, data: bytes, *, sync_name: bool = True) -> None:
    """Write a complete file. Use `sync_name=False` if losing the newest version does not matter."""
    os.close(create_durably(path, data))
    if sync_name:
        sync_folder(path.parent)


def _finished(file: DurableFile) -> int:
    try:
        return file.finish()
    except BaseException:
        file.discard()
        raise


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, so that each name survives a power loss.

    POSIX promises only what was synced: a file that was synced in a folder that was not is lost with the folder.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(path)  # noqa: PTH102
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
