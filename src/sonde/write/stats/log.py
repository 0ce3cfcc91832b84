"""The append-only log of a stream: CRC frames, `write`, `fdatasync`. A file that failed to sync is never trusted."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from sonde.schema.layout import LIVE_LOG
from sonde.schema.records import (
    FRAME_MAGIC,
    LOG_HEADER_SIZE,
    Frame,
    check_log_header,
    decode_frames,
    log_header,
)
from sonde.write.durable import TMP_SUFFIX, create_durably, sync_folder, write_all

_NUMBERED: Final = re.compile(r"live-(\d{8})\.log")
# After these errors the bytes before the failed write are intact; after any other error nothing is known.
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Log:
    """One open log. Its name is durable before the first frame is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = create_durably(path, log_header())
        self.size = LOG_HEADER_SIZE
        self.is_trusted = True
        try:
            sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, frames: bytes) -> None:
        """Write frames after the last good one. If an error occurs, they are removed again."""
        assert self.is_trusted
        try:
            write_all(self.fd, frames)
        except OSError as error:
            self._take_back(error)
            raise
        self.size += len(frames)

    def sync(self) -> None:
        """When this returns, everything appended is acknowledged."""
        try:
            os.fdatasync(self.fd)
        except OSError:
            # The kernel reports a failed write-back once and then calls the lost pages clean.
            self.is_trusted = False
            raise

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _take_back(self, error: OSError) -> None:
        if error.errno not in _NO_SPACE:
            self.is_trusted = False
            return
        try:
            os.ftruncate(self.fd, self.size)
        except OSError:
            self.is_trusted = False


@dataclass(slots=True)
class Recovered:
    """The contents of all logs in a folder: every valid frame once, in order of sequence."""

    frames: dict[int, Frame] = field(default_factory=dict)
    num_bytes: int = 0
    num_torn_bytes: int = 0
    """Bytes at the ends of logs that were never acknowledged."""
    num_damaged_bytes: int = 0
    """Bytes between valid frames that are no longer what was written."""


def log_paths(folder: Path) -> list[Path]:
    """The logs of a stream, oldest name first."""
    return sorted((path for path in folder.glob("*.log")), key=lambda path: (path.name != LIVE_LOG, path.name))


def next_log_path(folder: Path) -> Path:
    """A name that no log has yet."""
    paths = log_paths(folder)
    if not paths:
        return folder / LIVE_LOG
    numbers = [int(match.group(1)) for path in paths if (match := _NUMBERED.fullmatch(path.name))]
    return folder / f"live-{max(numbers, default=0) + 1:08d}.log"


def recover(folder: Path, *, after: int = -1) -> Recovered:
    """Read every log of a folder: torn tails are dropped, damage in the middle is skipped, the rest is kept."""
    found = Recovered()
    for path in log_paths(folder):
        data = _read(path)
        found.num_bytes += len(data)
        _recover_log(data, after, found)
    found.frames = dict(sorted(found.frames.items()))
    return found


def _read(path: Path) -> memoryview:
    """A complete file. Not mapped: a bad disk would end the process; numpy's memory, because it comes in large
    pages."""
    with path.open("rb", buffering=0) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data
        size = 0
        while num_read := file.readinto(data[size:]):
            size += num_read
    return data[:size]


def _recover_log(data: memoryview, after: int, found: Recovered) -> None:
    # Without a good header the frames still carry their own checksums.
    end = LOG_HEADER_SIZE if check_log_header(bytes(data[:LOG_HEADER_SIZE])) else 0
    while end < len(data):
        start = end
        for frame in _whole_frames(data, start):
            if frame.sequence > after:
                found.frames.setdefault(frame.sequence, frame)
            end = frame.end
        if end == len(data):
            return
        following = _next_frame(data, end + 1)
        if following < 0:
            found.num_torn_bytes += len(data) - end
            return
        found.num_damaged_bytes += following - end
        end = following


def _whole_frames(data: memoryview, start: int) -> Iterator[Frame]:
    with contextlib.suppress(ValueError, struct.error):  # counts that do not match under a valid checksum
        yield from decode_frames(data, start)


def _next_frame(data: memoryview, start: int) -> int:
    """The offset of the next valid frame, or -1."""
    rest = bytes(data[start:])
    position = rest.find(FRAME_MAGIC)
    while position >= 0:
        if next(_whole_frames(data, start + position), None) is not None:
            return start + position
        position = rest.find(FRAME_MAGIC, position + 1)
    return -1


def cut(folder: Path) -> Log:
    """Start an empty log that replaces all existing ones; their frames are in a sealed segment.

    A new file is renamed over the old one: truncating it would remove the bytes under a reader.
    """
    old = log_paths(folder)
    log = Log(folder / LIVE_LOG)
    for path in old:
        if path != log.path:
            os.unlink(path)  # noqa: PTH108
    return log


def remove_leftovers(folder: Path) -> None:
    """Remove files that a killed writer never finished."""
    for path in folder.glob(f"*{TMP_SUFFIX}"):
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
