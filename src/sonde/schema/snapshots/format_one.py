"""Reads snapshots of format 1, as earlier versions wrote them: shards, and tensors stored as a difference from an
earlier snapshot. Nothing writes it any more.

In format 1 a chunk is a part of a shard (`c/0`), which ends with the index of its chunks and the index's crc32c. Small
tensors of one kind and type share an array; a tensor's entry says at which element it starts.
"""

from __future__ import annotations

import math
import struct
from typing import Final

import numpy as np

from sonde.schema.snapshots.arrays import CHECKSUM_BYTES, MAX_BYTES, ArrayReader, DamageError, Layout, ReadAt, checked
from sonde.schema.snapshots.tensors import AnyArray

MAX_CHAIN: Final = 64
"""No writer created a longer chain of differences; a longer one is a cycle."""
_SLOT_BYTES: Final = 16
_EMPTY: Final = (1 << 64) - 1


class ShardReader(ArrayReader):
    """Elements of an array of shards; the index of a shard is read once."""

    def __init__(self, layout: Layout, read_at: ReadAt) -> None:
        super().__init__(layout, read_at)
        self._indexes: dict[int, list[tuple[int, int]]] = {}

    def _stored(self, chunk: int) -> bytes:
        shard, slot = divmod(chunk, self._chunks_per_shard())
        offset, size = self._index(shard)[slot]
        if offset == _EMPTY:
            raise DamageError(f"chunk {chunk} is missing")
        return self._read(shard, offset, size)

    def _chunks_per_shard(self) -> int:
        layout = self.layout
        assert layout.shard_length is not None
        if layout.axis == 0:
            return layout.shard_length
        return layout.shard_length * math.prod(layout.shape[1 : layout.axis]) * layout.blocks

    def _index(self, shard: int) -> list[tuple[int, int]]:
        if shard not in self._indexes:
            size = _SLOT_BYTES * self._chunks_per_shard() + CHECKSUM_BYTES
            data = checked(self._read(shard, -size, size), "the index of a shard")
            self._indexes[shard] = list(struct.iter_unpack("<QQ", data))
        return self._indexes[shard]

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        most = self._most() if offset >= 0 else MAX_BYTES
        if not CHECKSUM_BYTES <= size <= most or offset >= MAX_BYTES:
            raise DamageError(f"{size} bytes at {offset} are not a part of a shard")
        data = self._read_at("/".join(["c", str(shard), *["0"] * (len(self.layout.shape) - 1)]), offset, size)
        if len(data) != size:
            raise DamageError(f"the shard ends early: {len(data)} bytes instead of {size}")
        return data


def undo_difference(stored: AnyArray, before: AnyArray) -> AnyArray:
    """The bits of a tensor from its difference to an earlier snapshot, in the type of `before`.

    >>> undo_difference(np.array([4, 3], np.uint8), np.array([5, 7], np.uint8))
    array([7, 5], dtype=uint8)
    """
    width = stored.dtype.itemsize
    one = stored.dtype.type(1)
    signed = (stored >> one) ^ (np.zeros((), stored.dtype) - (stored & one))
    total: AnyArray = signed + before.view(f"u{width}")
    return total.view(before.dtype)
