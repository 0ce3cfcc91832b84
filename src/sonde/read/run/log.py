"""Incremental reading of the append-only logs of a stream. Stops at the first bad frame and reports it."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from sonde.errors import CorruptError
from sonde.read.run.folder import inside, open_inside
from sonde.schema.layout import Stream
from sonde.schema.records import (
    FRAME_MAGIC,
    LOG_HEADER_SIZE,
    MAX_FRAME_BYTES,
    Frame,
    ScalarsRecord,
    StatsRecord,
    check_log_header,
    decode_frames,
)

MAX_LOG_BYTES: Final = 2 << 30
_FRAME_START: Final = struct.Struct("<4sI")
_FRAME_HEADER_BYTES: Final = 12
_SPAN_BYTES: Final = 16 << 20
_HEAD_BYTES: Final = 64
"""Enough for the first frame's sequence and checksum: a different file under the same inode starts differently."""

End = Literal["clean", "torn", "damaged"]
"""The end of a log: after a complete frame, within an incomplete one, or at damaged bytes."""


@dataclass(slots=True)
class LogFile:
    """One `*.log`, up to the offset that has been read."""

    run: Path
    parts: tuple[str, ...]
    type: type[StatsRecord | ScalarsRecord]
    frames: list[Frame] = field(default_factory=list)
    offset: int = 0
    inode: int = -1
    head: bytes = b""
    end: End = "clean"

    def refresh(self) -> None:
        """Read what was appended; start over if the file was truncated or replaced."""
        try:
            file = open_inside(self.run, *self.parts)
        except FileNotFoundError:
            self._restart(-1)
            return
        with file:
            found = os.fstat(file.fileno())
            head = os.pread(file.fileno(), _HEAD_BYTES, 0)
            if found.st_ino != self.inode or found.st_size < self.offset or not head.startswith(self.head):
                self._restart(found.st_ino)
            self.head = head
            if not self._read(file.fileno(), found.st_size):
                # The file was truncated and has grown past our offset again: its frames are new.
                self._restart(found.st_ino)
                self._read(file.fileno(), found.st_size)

    def _restart(self, inode: int) -> None:
        self.frames, self.offset, self.inode, self.head, self.end = [], 0, inode, b"", "clean"

    def _read(self, descriptor: int, size: int) -> bool:
        """Decode from the offset to the end; False if this does not continue what was read before."""
        resumed = self.offset > 0
        if size <= self.offset:
            self.end = "clean"
            return True
        position, frames = self.offset, []
        self.end = "clean"
        if not resumed:
            head = os.pread(descriptor, LOG_HEADER_SIZE, 0)
            if not check_log_header(head):
                self.end = "torn" if len(head) < LOG_HEADER_SIZE else "damaged"
                return True
            position = LOG_HEADER_SIZE
        while position < size:
            data = _next_span(descriptor, position, size)
            found, length, intact = _decode(data, self.type)
            frames += found
            position += length
            if not found or not intact or position > MAX_LOG_BYTES:
                self.end = _end_of(data[length:]) if intact and position <= MAX_LOG_BYTES else "damaged"
                break
        if resumed and (self.end == "damaged" or not _continues(self.frames, frames)):
            return False
        self.frames.extend(frames)
        self.offset = position
        return True


def _next_span(descriptor: int, position: int, size: int) -> bytes:
    """Read several frames at once, or one large frame; stop at bytes that do not start a frame."""
    head = os.pread(descriptor, _FRAME_HEADER_BYTES, position)
    length = _FRAME_HEADER_BYTES + _FRAME_START.unpack_from(head)[1] if len(head) == _FRAME_HEADER_BYTES else 0
    is_frame = head.startswith(FRAME_MAGIC) and length <= min(MAX_FRAME_BYTES, size - position)
    return _read_span(descriptor, position, max(length, _SPAN_BYTES) if is_frame else _FRAME_HEADER_BYTES)


def _read_span(descriptor: int, offset: int, length: int) -> bytes:
    pieces = []
    while length > 0:
        piece = os.pread(descriptor, min(length, 64 << 20), offset)
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)


def _decode(data: bytes, type: type[StatsRecord | ScalarsRecord]) -> tuple[list[Frame], int, bool]:
    """The frames, the length of the valid ones, and whether each has the record type of its stream."""
    frames: list[Frame] = []
    end = 0
    for frame in decode_frames(data):
        if not isinstance(frame.record, type) or not _is_consistent(frame.record):
            return frames, end, False
        frames.append(frame)
        end = frame.end
    return frames, end, True


def _is_consistent(record: StatsRecord | ScalarsRecord) -> bool:
    if isinstance(record, ScalarsRecord):
        return True
    index = record.hist_index
    return not len(index) or bool(index.min() >= 0 and index.max() < len(record.site_ids))


def _end_of(rest: bytes) -> End:
    """Classify the bytes at which decoding stopped."""
    if len(rest) < _FRAME_HEADER_BYTES:
        return "torn"
    magic, length = _FRAME_START.unpack_from(rest)
    return "torn" if magic == FRAME_MAGIC and length + _FRAME_HEADER_BYTES > len(rest) else "damaged"


def _continues(old: list[Frame], new: list[Frame]) -> bool:
    return not old or not new or new[0].sequence == old[-1].sequence + 1


@dataclass(slots=True)
class StreamLog:
    """All logs of one stream and rank: after an I/O error the writer abandons a file and opens the next."""

    run: Path
    stream: Stream
    rank_folder: str
    files: dict[str, LogFile] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return int(self.rank_folder.removeprefix("rank-"))

    def refresh(self) -> None:
        self.problems = []
        names = sorted(name for name in list_folder(self.run, self.stream, self.rank_folder) if name.endswith(".log"))
        self.files = {name: self.files.get(name) or self._file(name) for name in names}
        for name, file in self.files.items():
            try:
                file.refresh()
            except (CorruptError, OSError) as error:
                self.problems.append(f"{self.stream}/{self.rank_folder}/{name}: {error}")
                continue
            if file.end == "damaged":
                self.problems.append(self._damage(name, file))

    def _file(self, name: str) -> LogFile:
        type = StatsRecord if self.stream == "stats" else ScalarsRecord
        return LogFile(self.run, (self.stream, self.rank_folder, name), type)

    def _damage(self, name: str, file: LogFile) -> str:
        where = f"after sequence {file.frames[-1].sequence}" if file.frames else "at its first frame"
        path = f"{self.stream}/{self.rank_folder}/{name}"
        return f"{path} is damaged {where} (byte {file.offset}); the rest of it is not read"

    @property
    def torn(self) -> list[str]:
        """Names of files that end in the middle of a frame."""
        return [f"{self.stream}/{self.rank_folder}/{name}" for name, file in self.files.items() if file.end == "torn"]

    def frames(self, after: int) -> list[Frame]:
        """Frames with a later sequence, each once, in order."""
        found: dict[int, Frame] = {}
        for file in self.files.values():
            for frame in file.frames:
                if frame.sequence > after:
                    found.setdefault(frame.sequence, frame)
        return [found[sequence] for sequence in sorted(found)]


def list_folder(run: Path, *parts: str) -> list[str]:
    """Names in a folder of the run; none if it does not exist."""
    try:
        return sorted(os.listdir(inside(run, *parts)))  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return []
