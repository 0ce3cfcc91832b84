"""Small tensors whose whole is the sum over ranks: `Partial` gradients. A sum has no sketch that merges, so each rank
keeps its addend, and they are added when they are read. No I/O.

An addend log is laid out like any log. Its frames have type 4 and this payload: i64 step, u32 attempt, u32 number of
tensors, u8 bytes per element (4 or 8); i32 site ids; u32 numbers of elements; f64 factors of clipping; the elements.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.records import FRAME_MAGIC, MAX_FRAME_BYTES

MAX_ADDEND_BYTES: Final = 64 << 10
"""Larger addends are not kept: the tensor is reported as not recorded."""
_KIND: Final = 4
_FRAME: Final = struct.Struct("<4sII")
_BODY: Final = struct.Struct("<QB")
_HEADER: Final = struct.Struct("<qIIB")


@dataclass(frozen=True, slots=True)
class Addends:
    """The addends of one rank at one step."""

    step: int
    site_ids: NDArray[np.int32]
    values: list[NDArray[Any]]
    """One flat array for each site, float32 or float64."""
    factors: NDArray[np.float64]
    """By which clipping has multiplied each; 1 if it did not."""
    attempt: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in self.values)


def encode_addends(sequence: int, record: Addends, attempt: int) -> bytes:
    width = max(value.itemsize for value in record.values)
    body = b"".join(
        (
            _BODY.pack(sequence, _KIND),
            _HEADER.pack(record.step, attempt, len(record.values), width),
            record.site_ids.astype("<i4").tobytes(),
            np.array([value.size for value in record.values], "<u4").tobytes(),
            record.factors.astype("<f8").tobytes(),
            *(value.astype(f"<f{width}").tobytes() for value in record.values),
        )
    )
    return _FRAME.pack(FRAME_MAGIC, len(body), zlib.crc32(body)) + body


def decode_addends(data: bytes, start: int) -> Iterator[Addends]:
    """The records from `start` up to the first frame that is incomplete or damaged."""
    while start + _FRAME.size <= len(data):
        magic, length, crc = _FRAME.unpack_from(data, start)
        start += _FRAME.size
        body = data[start : start + length]
        if magic != FRAME_MAGIC or length > MAX_FRAME_BYTES or len(body) < length or zlib.crc32(body) != crc:
            return
        try:
            if _BODY.unpack_from(body)[1] == _KIND:
                yield _decode(body[_BODY.size :])
        except (ValueError, struct.error):  # a valid checksum over an invalid body was made on purpose
            return
        start += length


def _decode(payload: bytes) -> Addends:
    step, attempt, count, width = _HEADER.unpack_from(payload)
    if width not in (4, 8):
        raise ValueError("elements have 4 or 8 bytes")
    at = _HEADER.size
    ids = np.frombuffer(payload, "<i4", count, at)
    sizes = np.frombuffer(payload, "<u4", count, at + 4 * count)
    factors = np.frombuffer(payload, "<f8", count, at + 8 * count)
    values = np.frombuffer(payload, f"<f{width}", offset=at + 16 * count)
    if len(values) != int(sizes.sum()):
        raise ValueError("the number of elements does not match")
    return Addends(step, ids, np.split(values, np.cumsum(sizes)[:-1]), factors, attempt)
