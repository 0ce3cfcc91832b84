"""How an array lies in Zarr v3 shards, and how its elements are found again. The layout is arithmetic; bytes come from
a function that is given, so that a file, a bucket and a test read by the same code. Every byte read is checked.

A chunk is always one contiguous run of the array's memory (chunks are cut along one axis only), so an array of any
shape is written in order, and a run of its elements is read by reading the chunks it touches. Each chunk ends in its
crc32c, as Zarr's codec of that name has it, and each shard in the index of its chunks and the index's crc32c.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sonde.errors import MissingPackageError
from sonde.schema.tensors import AnyArray

ReadAt = Callable[[str, int, int], bytes]
"""Bytes of a file of the array (`c/0/0`): from an offset, so many. An offset below zero counts from the end."""

CHECKSUM_BYTES: Final = 4
SLOT_BYTES: Final = 16
EMPTY: Final = (1 << 64) - 1
_PIECE: Final = 1 << 16
_MAX_BYTES: Final = 1 << 48


class DamageError(Exception):
    """A checksum or a length does not fit. The reader that knows the tensor's name says so to the user."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and cutting of one array. `axis` is cut into chunks of `length`; axes before it are cut into ones."""

    shape: tuple[int, ...]
    dtype: str
    """numpy's name of the type of its elements."""
    axis: int
    length: int
    """Along `axis`, of a chunk."""
    shard_length: int
    """Along axis 0, of a shard: chunks if that is the axis that is cut, else indices."""
    is_compressed: bool

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements per index of the axis that is cut."""
        return math.prod(self.shape[self.axis + 1 :])

    @property
    def blocks(self) -> int:
        """Chunks along the axis that is cut."""
        return -(-self.shape[self.axis] // self.length)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (*(1,) * self.axis, self.length, *self.shape[self.axis + 1 :])

    @property
    def shard_shape(self) -> tuple[int, ...]:
        if self.axis == 0:
            return (self.shard_length * self.length, *self.shape[1:])
        return (self.shard_length, *self.shape[1 : self.axis], self.blocks * self.length, *self.shape[self.axis + 1 :])

    @property
    def chunk_size(self) -> int:
        return self.length * self.row

    @property
    def num_chunks(self) -> int:
        return math.prod(self.shape[: self.axis]) * self.blocks if self.size else 0

    @property
    def chunks_per_shard(self) -> int:
        if self.axis == 0:
            return self.shard_length
        return self.shard_length * math.prod(self.shape[1 : self.axis]) * self.blocks

    @property
    def num_shards(self) -> int:
        return -(-self.num_chunks // self.chunks_per_shard)

    @property
    def index_bytes(self) -> int:
        return SLOT_BYTES * self.chunks_per_shard + CHECKSUM_BYTES

    def shard_key(self, shard: int) -> str:
        return "/".join(["c", str(shard), *["0"] * (len(self.shape) - 1)])

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """The run of elements that a chunk holds; its padding is not counted."""
        lead, block = divmod(chunk, self.blocks)
        start = (lead * self.shape[self.axis] + block * self.length) * self.row
        return start, start + min(self.length, self.shape[self.axis] - block * self.length) * self.row

    def chunks_of(self, start: int, stop: int) -> range:
        """The chunks that hold a run of elements."""
        if start >= stop:
            return range(0)
        return range(self._chunk_at(start), self._chunk_at(stop - 1) + 1)

    def _chunk_at(self, element: int) -> int:
        lead, rest = divmod(element, self.shape[self.axis] * self.row)
        return lead * self.blocks + rest // (self.length * self.row)

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "axis": self.axis,
            "length": self.length,
            "shard_length": self.shard_length,
            "is_compressed": self.is_compressed,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Layout:
        """Raises KeyError, TypeError or ValueError on what no writer of ours wrote."""
        shape = tuple(int(length) for length in content["shape"])
        layout = cls(
            shape,
            np.dtype(str(content["dtype"])).name,
            int(content["axis"]),
            int(content["length"]),
            int(content["shard_length"]),
            bool(content["is_compressed"]),
        )
        is_sound = shape and min(shape) >= 0 and 0 <= layout.axis < len(shape)
        if not is_sound or layout.length < 1 or layout.shard_length < 1 or layout.size * layout.itemsize > _MAX_BYTES:
            raise ValueError(f"no array lies so: {content}")
        return layout


def cut(shape: tuple[int, ...], dtype: str, *, chunk_bytes: int, shard_bytes: int, is_compressed: bool) -> Layout:
    """Chunks of about `chunk_bytes`, evenly long so that little is padding, in shards of about `shard_bytes`.

    >>> cut((1000, 300), "float32", chunk_bytes=1 << 18, shard_bytes=1 << 30, is_compressed=True).chunk_shape
    (200, 300)
    """
    itemsize = np.dtype(dtype).itemsize
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * itemsize > chunk_bytes:
        axis += 1
    row_bytes = max(math.prod(shape[axis + 1 :]) * itemsize, 1)
    blocks = max(-(-shape[axis] * row_bytes // chunk_bytes), 1)
    length = max(-(-shape[axis] // blocks), 1)
    if axis == 0:
        num = max(-(-shape[0] // length), 1)
        shard_length = min(num, max(shard_bytes // (length * row_bytes), 1))
    else:
        index_bytes = max(math.prod(shape[1:]) * itemsize, 1)
        shard_length = min(max(shape[0], 1), max(shard_bytes // index_bytes, 1))
    return Layout(shape, np.dtype(dtype).name, axis, length, shard_length, is_compressed)


class ArrayReader:
    """Elements of one array; the index of a shard is read once."""

    def __init__(self, layout: Layout, read_at: ReadAt) -> None:
        self.layout, self._read_at = layout, read_at
        self._indexes: dict[int, list[tuple[int, int]]] = {}

    def elements(self, start: int, stop: int) -> AnyArray:
        """A run of elements in memory order."""
        if not 0 <= start <= stop <= self.layout.size:
            raise DamageError(f"elements {start}:{stop} of an array that has {self.layout.size}")
        out = np.empty(stop - start, self.layout.dtype)
        for chunk, data in self._chunks(self.layout.chunks_of(start, stop)):
            first, last = self.layout.chunk_span(chunk)
            low, high = max(first, start), min(last, stop)
            out[low - start : high - start] = data[low - first : high - first]
        return out

    def _chunks(self, chunks: range) -> Iterator[tuple[int, AnyArray]]:
        for chunk in chunks:
            shard, slot = divmod(chunk, self.layout.chunks_per_shard)
            offset, size = self._index(shard)[slot]
            if offset == EMPTY:
                raise DamageError(f"chunk {chunk} is missing")
            yield chunk, self._decode(checked(self._read(shard, offset, size), f"chunk {chunk}"))

    def _decode(self, data: memoryview) -> AnyArray:
        expected = self.layout.chunk_size * self.layout.itemsize
        if self.layout.is_compressed:
            data = decompressed(data, expected)
        if len(data) != expected:
            raise DamageError(f"a chunk of {len(data)} bytes; it should have {expected}")
        return np.frombuffer(data, self.layout.dtype)

    def _index(self, shard: int) -> list[tuple[int, int]]:
        if shard not in self._indexes:
            data = checked(self._read(shard, -self.layout.index_bytes, self.layout.index_bytes), "the index of a shard")
            self._indexes[shard] = list(struct.iter_unpack("<QQ", data))
        return self._indexes[shard]

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        if not CHECKSUM_BYTES <= size <= max(self._most(), self.layout.index_bytes) or offset >= _MAX_BYTES:
            raise DamageError(f"{size} bytes at {offset} are no part of a shard")
        data = self._read_at(self.layout.shard_key(shard), offset, size)
        if len(data) != size:
            raise DamageError(f"the shard ends early: {len(data)} bytes where {size} should be")
        return data

    def _most(self) -> int:
        """No codec of ours makes a chunk longer than this; a larger number is damage, and is not allocated."""
        return self.layout.chunk_size * self.layout.itemsize + 4096


def checksum(data: bytes) -> int:
    try:
        import google_crc32c
    except ImportError:
        raise MissingPackageError("google-crc32c", "tensors", "Reading and writing tensors") from None
    return int(google_crc32c.value(data))


def checksum_of(bits: AnyArray) -> int:
    """The crc32c of a flat array's bytes, in pieces that stay in the processor's cache while they are copied."""
    import google_crc32c

    total = 0
    for start in range(0, bits.size, _PIECE):
        total = google_crc32c.extend(total, bits[start : start + _PIECE].tobytes())
    return int(total)


def checked(data: bytes, what: str) -> memoryview:
    """The bytes without their checksum, when that fits."""
    body, stored = data[:-CHECKSUM_BYTES], int.from_bytes(data[-CHECKSUM_BYTES:], "little")
    if checksum(body) != stored:
        raise DamageError(f"the checksum of {what} does not match")
    return memoryview(body)


def decompressed(data: memoryview, expected: int) -> memoryview:
    """Undo blosc. What the header says is compared first: a damaged one may ask for any amount of memory."""
    try:
        from numcodecs import blosc
    except ImportError:
        raise MissingPackageError("numcodecs", "tensors", "Reading and writing tensors") from None
    if len(data) < 16 or int.from_bytes(data[4:8], "little") != expected:
        raise DamageError("the header of a compressed chunk is damaged")
    try:
        return memoryview(blosc.decompress(bytes(data)))
    except (RuntimeError, ValueError) as error:
        raise DamageError(f"a chunk cannot be decompressed: {error}") from error
