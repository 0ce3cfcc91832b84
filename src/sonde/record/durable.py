"""Write a whole file so that it is either the old one or the new one, also after a power loss. Knows no format."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TMP_SUFFIX = ".tmp"


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte; a full disk shows as a short write first and as an error only on the next one."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        view = view[written:]


def create_durably(path: Path, data: bytes | memoryview) -> int:
    """tmp + fsync + rename; gives back the open descriptor. The folder's entry still needs `sync_folder`."""
    tmp = path.with_name(path.name + TMP_SUFFIX)
    fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
        os.replace(tmp, path)  # noqa: PTH105  every system call of this room goes through `os`, where a test can break it
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(tmp)  # noqa: PTH108  half a file would keep the space that was missing
        raise
    return fd


def write_durably(path: Path, data: bytes | memoryview, *, sync_name: bool = True) -> None:
    """tmp + fsync + rename + folder fsync. `sync_name=False` where losing the newest version is no loss."""
    os.close(create_durably(path, data))
    if sync_name:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
