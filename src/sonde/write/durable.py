"""Write a whole file so that it is either the old one or the new one, also after a power loss. Knows no format."""

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
    """A descriptor that is none of the first three: where a program runs with stderr closed, what a library prints
    there would otherwise be written into our file."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    if fd > _LAST_STANDARD:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD + 1)
    finally:
        os.close(fd)


class DurableFile:
    """A file that appears under its name only when it is whole: tmp + fsync + rename. `sha256` is of what was written.

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
        """Nothing is buffered."""

    def finish(self) -> int:
        """Give the file its name, and its open descriptor away. The folder's entry still needs `sync_folder`."""
        os.fsync(self.fd)
        os.replace(self._tmp, self.path)  # noqa: PTH105  all system calls here go through `os`, where a test can break them
        fd, self.fd = self.fd, -1
        return fd

    def discard(self) -> None:
        """Half a file would keep the space that was missing."""
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
    """A whole file under its name, and its open descriptor. The folder's entry still needs `sync_folder`."""
    file = DurableFile(path)
    try:
        file.write(data)
    except BaseException:
        file.discard()
        raise
    return _finished(file)


def write_durably(path: Path, data: bytes, *, sync_name: bool = True) -> None:
    """A whole file. `sync_name=False` where losing the newest version is no loss."""
    os.close(create_durably(path, data))
    if sync_name:
        sync_folder(path.parent)


def _finished(file: DurableFile) -> int:
    try:
        return file.finish()
    except BaseException:
        file.discard()
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
