"""Tail the append-only logs of a stream by offset. Stops at the first bad frame, and says what it stopped at."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from sonde.errors import CorruptError
from sonde.read.folder import inside, open_inside
from sonde.schema.layout import Stream
from sonde.schema.records import (
    FRAME_MAGIC,
    LOG_HEADER_SIZE,
    Frame,
    ScalarsRecord,
    StatsRecord,
    check_log_header,
    decode_frames,
)

MAX_LOG_BYTES: Final = 2 << 30
_FRAME_START: Final = struct.Struct("<4sI")
_FRAME_HEADER_BYTES: Final = 12
_HEAD_BYTES: Final = 64
"""Enough to hold the first frame's sequence and checksum: another file under the same inode begins differently."""

End = Literal["clean", "torn", "damaged"]
"""How a log ends: behind a whole frame, in one that was never finished, or at bytes that are not what was written."""


@dataclass(slots=True)
class LogFile:
    """One `*.log`, as far as it has been read."""

    run: Path
    parts: tuple[str, ...]
    type: type[StatsRecord | ScalarsRecord]
    frames: list[Frame] = field(default_factory=list)
    offset: int = 0
    inode: int = -1
    head: bytes = b""
    end: End = "clean"

    def refresh(self) -> None:
        """Read what was appended since; start again when the file was cut or replaced."""
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
                # The file was cut and has grown again past where we were: its frames are new ones.
                self._restart(found.st_ino)
                self._read(file.fileno(), found.st_size)

    def _restart(self, inode: int) -> None:
        self.frames, self.offset, self.inode, self.head, self.end = [], 0, inode, b"", "clean"

    def _read(self, descriptor: int, size: int) -> bool:
        """Decode from the offset to the end; False when that does not continue what was read before."""
        resumed = self.offset > 0
        if size <= self.offset:
            self.end = "clean"
            return True
        data = _read_span(descriptor, self.offset, min(size, MAX_LOG_BYTES) - self.offset)
        start = 0
        if not resumed:
            if not check_log_header(data):
                self.end = "torn" if len(data) < LOG_HEADER_SIZE else "damaged"
                return True
            start = LOG_HEADER_SIZE
        frames, end, intact = _decode(data, start, self.type)
        self.end = ("clean" if end == len(data) else _end_of(data, end)) if intact else "damaged"
        if size > MAX_LOG_BYTES:
            self.end = "damaged"
        if resumed and (self.end == "damaged" or not _continues(self.frames, frames)):
            return False
        self.frames.extend(frames)
        self.offset += end
        return True


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


def _decode(data: bytes, start: int, type: type[StatsRecord | ScalarsRecord]) -> tuple[list[Frame], int, bool]:
    """Frames, the offset behind the last good one, and whether each held what its stream holds."""
    frames: list[Frame] = []
    end = start
    try:
        for frame in decode_frames(data, start):
            if not isinstance(frame.record, type) or not _is_consistent(frame.record):
                return frames, end, False
            frames.append(frame)
            end = frame.end
    except (ValueError, struct.error):  # a valid checksum over counts that do not fit: written so on purpose
        return frames, end, False
    return frames, end, True


def _is_consistent(record: StatsRecord | ScalarsRecord) -> bool:
    if isinstance(record, ScalarsRecord):
        return True
    index = record.hist_index
    return not len(index) or bool(index.min() >= 0 and index.max() < len(record.site_ids))


def _end_of(data: bytes, end: int) -> End:
    rest = len(data) - end
    if rest < _FRAME_HEADER_BYTES:
        return "torn"
    magic, length = _FRAME_START.unpack_from(data, end)
    return "torn" if magic == FRAME_MAGIC and length + _FRAME_HEADER_BYTES > rest else "damaged"


def _continues(old: list[Frame], new: list[Frame]) -> bool:
    return not old or not new or new[0].sequence == old[-1].sequence + 1


@dataclass(slots=True)
class StreamLog:
    """All logs of one stream and rank: after an I/O error the writer leaves a file and opens the next."""

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
        where = f"behind sequence {file.frames[-1].sequence}" if file.frames else "at its first frame"
        return (
            f"{self.stream}/{self.rank_folder}/{name} is damaged {where} (byte {file.offset}); what follows is not read"
        )

    @property
    def torn(self) -> list[str]:
        """Files that end in the middle of a frame."""
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
    """Names in a folder of the run; none when it is not there."""
    try:
        return sorted(os.listdir(inside(run, *parts)))  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return []
