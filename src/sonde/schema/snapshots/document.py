"""The document of a snapshot, and how a tensor is assembled from it, with checksums verified. No I/O.

A snapshot is a Zarr group; "sonde" in the attributes of its `zarr.json` holds all facts about the snapshot, and next to
it the checksum of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sonde.distribution import DISTRIBUTION
from sonde.errors import CorruptError, FormatError, UnknownNameError, UsageError
from sonde.schema.snapshots.arrays import MAX_BYTES, ArrayReader, DamageError, Layout, ReadAt, checksum_of
from sonde.schema.snapshots.format_one import MAX_CHAIN, ShardReader, undo_difference
from sonde.schema.snapshots.tensors import (
    ATTRIBUTE,
    SNAPSHOT_FORMAT,
    STORAGE,
    AnyArray,
    as_values,
    is_inside,
    storage_dtype,
)

CHECKSUM_ATTRIBUTE: Final = "sonde_crc32"
MAX_DOCUMENT_BYTES: Final = 64 << 20
"""A larger one is not read: a foreign folder must not use up all memory."""

Index = int | slice


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The location of one tensor of a snapshot, and its checksum."""

    array: str
    """The path of its Zarr array in the snapshot's group."""
    layout: Layout
    """The layout of that array."""
    shape: tuple[int, ...]
    dtype: str
    """The torch name: "bfloat16"."""
    crc32c: int
    """Checksum of the tensor's raw little-endian bytes."""
    keep_mantissa_bits: int | None = None
    """The number of mantissa bits kept, if rounding was requested."""
    offset: int = 0
    """Its first element in an array of several tensors. Format 1 only."""
    delta_of: int | None = None
    """The step that the array is stored as a difference from. Format 1 only."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * storage_dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        rounded = {} if self.keep_mantissa_bits is None else {"keep_mantissa_bits": self.keep_mantissa_bits}
        tensor = {"array": self.array, "shape": list(self.shape), "dtype": self.dtype, "crc32c": self.crc32c}
        return {**tensor, **self.layout.to_json(), **rounded}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], arrays: Mapping[str, Any] | None) -> TensorEntry:
        """`arrays` are those of format 1. Raises KeyError, TypeError or ValueError on content that none of our writers
        wrote."""
        shape = tuple(int(length) for length in content["shape"])
        delta_of, kept = content.get("delta_of"), content.get("keep_mantissa_bits")
        entry = cls(
            array=str(content["array"]),
            layout=Layout.from_json(content if arrays is None else arrays[content["array"]]),
            shape=shape,
            dtype=str(content["dtype"]),
            crc32c=int(content["crc32c"]),
            keep_mantissa_bits=None if kept is None else int(kept),
            offset=int(content.get("offset") or 0),
            delta_of=None if delta_of is None else int(delta_of),
        )
        is_tensor = entry.dtype in STORAGE and min(shape, default=0) >= 0 and entry.nbytes <= MAX_BYTES
        if not is_tensor or not is_inside(entry.array):
            raise ValueError(f"invalid tensor entry: {content}")
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDocument:
    """The facts about one snapshot that are known without reading a tensor."""

    step: int
    time: float
    reason: str
    tensors: Mapping[str, TensorEntry]
    rank: int = 0
    attempt: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""
    """Checksum of the bytes it was read from."""

    @property
    def bases(self) -> set[int]:
        """The steps that this one is stored as a difference from. Format 1 only."""
        return {entry.delta_of for entry in self.tensors.values() if entry.delta_of is not None}

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    def to_attributes(self) -> dict[str, Any]:
        content = {
            "format": SNAPSHOT_FORMAT,
            "step": self.step,
            "time": self.time,
            "reason": self.reason,
            "rank": self.rank,
            **({"attempt": self.attempt} if self.attempt else {}),
            "details": dict(self.details),
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }
        return {ATTRIBUTE: content, CHECKSUM_ATTRIBUTE: f"{_sum(content):08x}"}

    def to_bytes(self) -> bytes:
        """The group's zarr.json."""
        group = {"zarr_format": 3, "node_type": "group", "attributes": self.to_attributes()}
        return json.dumps(group, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> SnapshotDocument:
        """Read a group's document; damage is a CorruptError that says where."""
        if len(data) > MAX_DOCUMENT_BYTES:
            raise CorruptError(
                f"the document of {where} is larger than {MAX_DOCUMENT_BYTES >> 20} MiB; it is not read."
            )
        try:
            document = cls.from_attributes(json.loads(data)["attributes"], where)
            return replace(document, sha256=hashlib.sha256(data).hexdigest())
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptError(f"the document of {where} is damaged ({error!r}). Its tensors are not shown.") from error

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any], where: str) -> SnapshotDocument:
        content = attributes[ATTRIBUTE]
        if f"{_sum(content):08x}" != attributes[CHECKSUM_ATTRIBUTE]:
            raise CorruptError(f"the checksum of the document of {where} does not match. Its tensors are not shown.")
        if content["format"] > SNAPSHOT_FORMAT:
            raise FormatError(
                f"{where} has format {content['format']}; this version of sonde reads {SNAPSHOT_FORMAT}. "
                f"Run:  pip install -U {DISTRIBUTION}"
            )
        arrays = content["arrays"] if content["format"] == 1 else None
        return cls(
            step=int(content["step"]),
            time=float(content["time"]),
            reason=str(content["reason"]),
            rank=int(content["rank"]),
            attempt=int(content.get("attempt", 0)),
            details=dict(content["details"]),
            tensors={name: TensorEntry.from_json(entry, arrays) for name, entry in content["tensors"].items()},
        )


class SnapshotReader:
    """Tensors of one snapshot. `read_at` reads files of its group; `base` opens one that it is a difference from."""

    def __init__(
        self, document: SnapshotDocument, read_at: ReadAt, base: Callable[[int], SnapshotReader], where: str
    ) -> None:
        self.document, self.where = document, where
        self._read_at, self._base = read_at, base

    def entry(self, name: str) -> TensorEntry:
        try:
            return self.document.tensors[name]
        except KeyError:
            raise UnknownNameError(f"tensor at step {self.document.step}", name, self.document.tensors) from None

    def bits(self, name: str) -> AnyArray:
        """All bits of a tensor, flat, verified with its checksum."""
        entry = self.entry(name)
        bits = self._run(name, entry, 0, entry.size)
        if checksum_of(bits) != entry.crc32c:
            raise self._corrupt(name, "its checksum does not match")
        return bits

    def values(self, name: str) -> AnyArray:
        entry = self.entry(name)
        return as_values(self.bits(name).reshape(entry.shape), entry.dtype)

    def part(self, name: str, index: Sequence[Index] | Index) -> AnyArray:
        """The same as `values(name)[index]`, but reads only the necessary chunks along the first axis.

        Each chunk is verified with its own checksum; the whole tensor's cannot be.
        """
        entry = self.entry(name)
        given = (index,) if isinstance(index, int | slice) else tuple(index)
        if len(given) > len(entry.shape):
            raise UsageError(f"{name} has {len(entry.shape)} dimensions, but the index has {len(given)}.")
        if not given or not entry.size:
            return np.asarray(self.values(name)[given])
        start, stop = _bounds(given[0], entry.shape[0], name)
        row = entry.size // entry.shape[0]
        bits = self._run(name, entry, start * row, stop * row).reshape(stop - start, *entry.shape[1:])
        first = given[0] % entry.shape[0] - start if isinstance(given[0], int) else _shifted(given[0], entry.shape[0])
        return np.asarray(as_values(bits, entry.dtype)[(first, *given[1:])])

    def _run(self, name: str, entry: TensorEntry, start: int, stop: int, depth: int = 0) -> AnyArray:
        """A range of a tensor's elements."""
        try:
            stored = self._array(entry).elements(entry.offset + start, entry.offset + stop)
        except DamageError as error:
            raise self._corrupt(name, str(error)) from error
        return stored if entry.delta_of is None else self._undone(name, entry, stored, start, depth)

    def _undone(self, name: str, entry: TensorEntry, stored: AnyArray, start: int, depth: int) -> AnyArray:
        """The values that a range of differences represents. Format 1 only."""
        if depth > MAX_CHAIN:
            raise self._corrupt(name, "its differences form a cycle")
        assert entry.delta_of is not None
        base = self._base(entry.delta_of)
        before = base.document.tensors.get(name)
        if before is None or before.shape != entry.shape or before.dtype != entry.dtype:
            raise self._corrupt(
                name, f"it is stored as a difference from step {entry.delta_of}, which has no such tensor"
            )
        return undo_difference(stored, base._run(name, before, start, start + stored.size, depth + 1))

    def _array(self, entry: TensorEntry) -> ArrayReader:
        reader = ArrayReader if entry.layout.shard_length is None else ShardReader
        return reader(entry.layout, lambda key, offset, size: self._read_at(f"{entry.array}/{key}", offset, size))

    def _corrupt(self, name: str, why: str) -> CorruptError:
        return CorruptError(f'tensor "{name}" at step {self.document.step} of {self.where} is damaged: {why}.')


def _sum(content: Any) -> int:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


def _bounds(index: Index, length: int, name: str) -> tuple[int, int]:
    """The range of an axis that an index touches."""
    if isinstance(index, slice):
        touched = range(*index.indices(length))
        return (min(touched[0], touched[-1]), max(touched[0], touched[-1]) + 1) if touched else (0, 0)
    if not -length <= index < length:
        raise UsageError(f"index {index} is out of range for {name}: its first axis has length {length}.")
    return index % length, index % length + 1


def _shifted(index: slice, length: int) -> slice:
    """The same indices, relative to the first one that was read."""
    step = index.indices(length)[2]
    return slice(None, None, step)
