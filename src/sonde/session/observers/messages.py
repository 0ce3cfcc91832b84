"""Messages between the training process and the one that runs the rules: pickled, with arrays sent as they are.

Both ends are this version of sonde, and nothing else writes to the pipes.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import deque
from itertools import islice
from typing import Any, BinaryIO, Final

_SIZE: Final = struct.Struct("<Q")
_PARTS_AT_ONCE: Final = 1024
"""The limit of Linux and macOS. A pipe takes them all before the call returns."""


def encode(message: Any) -> list[memoryview]:
    """The number of parts, their sizes, and the parts: a pickle, and the memory of the arrays in it."""
    buffers: list[pickle.PickleBuffer] = []
    parts = [memoryview(pickle.dumps(message, 5, buffer_callback=buffers.append))]
    parts += [buffer.raw() for buffer in buffers]
    head = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts))
    return [memoryview(head), *(part for part in parts if part.nbytes)]


def send(fd: int, message: Any) -> None:
    """Write a message. Waits while the pipe is full, without holding the interpreter."""
    waiting = deque(encode(message))
    while waiting:
        written = os.writev(fd, list(islice(waiting, _PARTS_AT_ONCE)))
        while written:
            part = waiting.popleft()
            if part.nbytes > written:
                waiting.appendleft(part[written:])
            written -= min(part.nbytes, written)


def receive(file: BinaryIO) -> Any:
    """Wait for a message. `EOFError` at the end of the pipe."""
    (num_parts,) = _SIZE.unpack(_read(file, _SIZE.size))
    sizes = struct.unpack(f"<{num_parts}Q", _read(file, num_parts * _SIZE.size))
    pickled, *buffers = [_read(file, size) for size in sizes]
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301  from our own process


def _read(file: BinaryIO, size: int) -> bytearray:
    found = bytearray(size)
    view = memoryview(found)
    while view.nbytes:
        num_read = file.readinto(view)  # type: ignore[attr-defined]
        if not num_read:
            raise EOFError
        view = view[num_read:]
    return found


class Inbox:
    """Messages from a pipe that must not be waited for: bytes in, complete messages out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[Any]:
        """The messages that are complete with these bytes."""
        self._bytes += data
        found = []
        while (size := self._first_size()) is not None:
            found.append(receive(io.BytesIO(self._bytes[:size])))
            del self._bytes[:size]
        return found

    def _first_size(self) -> int | None:
        if len(self._bytes) < _SIZE.size:
            return None
        (num_parts,) = _SIZE.unpack_from(self._bytes)
        head = _SIZE.size * (1 + num_parts)
        if len(self._bytes) < head:
            return None
        size = head + sum(struct.unpack_from(f"<{num_parts}Q", self._bytes, _SIZE.size))
        return size if len(self._bytes) >= size else None
