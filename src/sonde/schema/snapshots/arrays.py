"""How an array is divided into chunks, and how its elements are found again. The layout is arithmetic; the caller
provides a function that reads bytes, so that a file, a bucket and a test use the same code. Every byte read is checked.

A chunk is always one contiguous range of the array's memory (chunks are split along one axis only), so an array of any
shape is written in order, and a range of its elements is read from the chunks it touches. Each chunk ends with its
crc32c, as in Zarr's codec of that name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sonde.schema.packages import require
from sonde.schema.snapshots.tensors import STORAGE, AnyArray

ReadAt = Callable[[str, int, int], bytes]
"""Reads bytes of a file of the array (`c/0/0`): from an offset, at most N. A negative offset counts from the end."""

CHECKSUM_BYTES: Final = 4
MAX_BYTES: Final = 1 << 48
_PIECE: Final = 1 << 16


class DamageError(Exception):
    """A checksum or a length does not match. The reader that knows the tensor's name reports it to the user."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and chunks of one array. `axis` is split into chunks of `length`; axes before it into chunks of one."""

    shape: tuple[int, ...]
    dtype: str
    """The numpy name of its element type."""
    axis: int
    length: int
    """Length of a chunk along `axis`."""
    is_compressed: bool
    shard_length: int | None = None
    """Only in snapshots of format 1, see format_one.py."""

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Length of the axis that is split."""
        return self.shape[self.axis] if self.shape else 1

    @property
    def row(self) -> int:
        """Elements per index of the axis that is split."""
        return math.prod(self.shape[self.axis + 1 :])

    @property
    def blocks(self) -> int:
        """Chunks along the axis that is split."""
        return -(-self.extent // self.length)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        cut = (*(1,) * self.axis, self.length, *self.shape[self.axis + 1 :]) if self.shape else ()
        return tuple(max(length, 1) for length in cut)

    @property
    def chunk_size(self) -> int:
        return self.length * self.row

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_size * self.itemsize

    @property
    def num_chunks(self) -> int:
        return math.prod(self.shape[: self.axis]) * self.blocks if self.size else 0

    def chunk_key(self, chunk: int) -> str:
        """The Zarr name: `c/2/0`."""
        lead, block = divmod(chunk, self.blocks)
        before = np.unravel_index(lead, self.shape[: self.axis]) if self.axis else ()
        indices = (*before, block, *(0,) * (len(self.shape) - self.axis - 1)) if self.shape else ()
        return "/".join(["c", *map(str, indices)])

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """The range of elements in a chunk, without its padding."""
        lead, block = divmod(chunk, self.blocks)
        start = (lead * self.extent + block * self.length) * self.row
        return start, start + min(self.length, self.extent - block * self.length) * self.row

    def chunks_of(self, start: int, stop: int) -> range:
        if start >= stop:
            return range(0)
        return range(self._chunk_at(start), self._chunk_at(stop - 1) + 1)

    def _chunk_at(self, element: int) -> int:
        lead, rest = divmod(element, self.extent * self.row)
        return lead * self.blocks + rest // (self.length * self.row)

    def to_json(self) -> dict[str, Any]:
        """The facts that the shape and the dtype of the tensor do not imply."""
        return {"axis": self.axis, "length": self.length, "is_compressed": self.is_compressed}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Layout:
        """Raises KeyError, TypeError or ValueError on content that none of our writers wrote."""
        shape = tuple(int(length) for length in content["shape"])
        shard_length = content.get("shard_length")
        layout = cls(
            shape,
            STORAGE[content["dtype"]],
            int(content["axis"]),
            int(content["length"]),
            bool(content["is_compressed"]),
            None if shard_length is None else int(shard_length),
        )
        is_cut = 0 <= layout.axis < max(len(shape), 1) and (shard_length is None or int(shard_length) >= 1)
        if min(shape, default=0) < 0 or not is_cut or not 1 <= layout.length <= max(layout.extent, 1):
            raise ValueError(f"invalid chunk layout of an array: {content}")
        if layout.size * layout.itemsize > MAX_BYTES:
            raise ValueError(f"invalid array size: {content}")
        return layout


def cut(shape: tuple[int, ...], dtype: str, *, chunk_bytes: int, is_compressed: bool) -> Layout:
    """Chunks of at most about `chunk_bytes`, of equal length to keep the padding small.

    >>> cut((1000, 300), "float32", chunk_bytes=1 << 18, is_compressed=True).chunk_shape
    (200, 300)
    """
    itemsize = np.dtype(dtype).itemsize
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * itemsize > chunk_bytes:
        axis += 1
    extent = shape[axis] if shape else 1
    row_bytes = max(math.prod(shape[axis + 1 :]) * itemsize, 1)
    blocks = max(-(-extent * row_bytes // chunk_bytes), 1)
    return Layout(shape, np.dtype(dtype).name, axis, max(-(-extent // blocks), 1), is_compressed)


class ArrayReader:
    def __init__(self, layout: Layout, read_at: ReadAt) -> None:
        self.layout, self._read_at = layout, read_at

    def elements(self, start: int, stop: int) -> AnyArray:
        """A range of elements in memory order."""
        if not 0 <= start <= stop <= self.layout.size:
            raise DamageError(f"elements {start}:{stop} of an array that has {self.layout.size}")
        out = np.empty(stop - start, self.layout.dtype)
        for chunk in self.layout.chunks_of(start, stop):
            data = self._decoded(checked(self._stored(chunk), f"chunk {chunk}"))
            first, last = self.layout.chunk_span(chunk)
            low, high = max(first, start), min(last, stop)
            out[low - start : high - start] = data[low - first : high - first]
        return out

    def _stored(self, chunk: int) -> bytes:
        data = self._read_at(self.layout.chunk_key(chunk), 0, self._most() + 1)
        if not CHECKSUM_BYTES <= len(data) <= self._most():
            raise DamageError(f"chunk {chunk} has an impossible size")
        return data

    def _decoded(self, data: memoryview) -> AnyArray:
        expected = self.layout.chunk_bytes
        if self.layout.is_compressed:
            data = decompressed(data, expected)
        if len(data) != expected:
            raise DamageError(f"a chunk has {len(data)} bytes; expected {expected}")
        return np.frombuffer(data, self.layout.dtype)

    def _most(self) -> int:
        """The longest chunk that our codecs create; a larger number is damage, and is not allocated."""
        return self.layout.chunk_bytes + 4096


def checksum(data: bytes) -> int:
    return int(require("google_crc32c", "tensors", "Reading and writing tensors").value(data))


def checksum_of(bits: AnyArray) -> int:
    """The crc32c of a flat array's bytes, in pieces that stay in the processor's cache while they are copied."""
    import google_crc32c

    total = 0
    for start in range(0, bits.size, _PIECE):
        total = google_crc32c.extend(total, bits[start : start + _PIECE].tobytes())
    return int(total)


def checked(data: bytes, what: str) -> memoryview:
    """The bytes without their checksum, if that matches."""
    body, stored = data[:-CHECKSUM_BYTES], int.from_bytes(data[-CHECKSUM_BYTES:], "little")
    if checksum(body) != stored:
        raise DamageError(f"the checksum of {what} does not match")
    return memoryview(body)


def decompressed(data: memoryview, expected: int) -> memoryview:
    """Decompress blosc. The header is checked first: a damaged one may ask for any amount of memory."""
    blosc = require("numcodecs.blosc", "tensors", "Reading and writing tensors")
    if len(data) < 16 or int.from_bytes(data[4:8], "little") != expected:
        raise DamageError("the header of a compressed chunk is damaged")
    try:
        return memoryview(blosc.decompress(bytes(data)))
    except (RuntimeError, ValueError) as error:
        raise DamageError(f"a chunk cannot be decompressed: {error}") from error
