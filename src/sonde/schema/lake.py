"""The document of a snapshot, and how a tensor is put together from it: differences undone, checksums compared. No I/O.

`tensors/step-000000500/zarr.json` is the document of a Zarr group; under "sonde" in its attributes is everything there
is to know about the snapshot, and beside it the checksum of that.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sonde.errors import CorruptError, FormatError, UnknownNameError, UsageError
from sonde.schema.shards import ArrayReader, DamageError, Layout, ReadAt, checksum_of
from sonde.schema.tensors import ATTRIBUTE, SNAPSHOT_FORMAT, AnyArray, TensorEntry, as_values, is_array_name

CHECKSUM_ATTRIBUTE: Final = "sonde_crc32"
MAX_CHAIN: Final = 64
"""No writer of ours makes a longer chain of differences; a longer one goes in circles."""

Index = int | slice


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDocument:
    """What is known of one snapshot without reading a tensor."""

    step: int
    time: float
    reason: str
    tensors: Mapping[str, TensorEntry]
    arrays: Mapping[str, Layout]
    rank: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bases(self) -> set[int]:
        """The steps this one is a difference to."""
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
            "details": dict(self.details),
            "arrays": {name: layout.to_json() for name, layout in self.arrays.items()},
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
        try:
            return cls.from_attributes(json.loads(data)["attributes"], where)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptError(f"the document of {where} is damaged ({error!r}). Its tensors are not shown.") from error

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any], where: str) -> SnapshotDocument:
        content = attributes[ATTRIBUTE]
        if f"{_sum(content):08x}" != attributes[CHECKSUM_ATTRIBUTE]:
            raise CorruptError(f"the checksum of the document of {where} does not match. Its tensors are not shown.")
        if content["format"] > SNAPSHOT_FORMAT:
            raise FormatError(
                f"{where} has format {content['format']}; this sonde reads {SNAPSHOT_FORMAT}. "
                "Run:  pip install -U sonde"
            )
        if not all(map(is_array_name, content["arrays"])):
            raise CorruptError(f"{where} names arrays outside itself. Its tensors are not shown.")
        return cls(
            step=int(content["step"]),
            time=float(content["time"]),
            reason=str(content["reason"]),
            rank=int(content["rank"]),
            details=dict(content["details"]),
            arrays={name: Layout.from_json(array) for name, array in content["arrays"].items()},
            tensors={name: TensorEntry.from_json(entry) for name, entry in content["tensors"].items()},
        )


class RecentRuns:
    """What was read last, for reading a tensor step after step: each step is a difference to the one before.

    Wanted is a cache of a few megabytes, so that the whole chain is not read again for each of its steps.
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        self._limit, self._num_bytes = limit, 0
        self._runs: OrderedDict[tuple[int, str, int, int], AnyArray] = OrderedDict()
        self._lock = threading.Lock()  # Dask reads by several threads

    def get(self, key: tuple[int, str, int, int]) -> AnyArray | None:
        with self._lock:
            return self._runs.get(key)

    def keep(self, key: tuple[int, str, int, int], run: AnyArray) -> None:
        if run.nbytes > self._limit:
            return
        run.flags.writeable = False
        with self._lock:
            known = self._runs.pop(key, None)
            self._num_bytes += run.nbytes - (known.nbytes if known is not None else 0)
            self._runs[key] = run
            while self._num_bytes > self._limit:
                self._num_bytes -= self._runs.popitem(last=False)[1].nbytes


class SnapshotReader:
    """Tensors of one snapshot. `read_at` reads files of its group; `base` opens the snapshots it is a difference to."""

    def __init__(
        self,
        document: SnapshotDocument,
        read_at: ReadAt,
        base: Callable[[int], SnapshotReader],
        where: str,
        recent: RecentRuns | None = None,
    ) -> None:
        self.document, self.where = document, where
        self._read_at, self._base = read_at, base
        self._recent = recent if recent is not None else RecentRuns(0)
        self._arrays: dict[str, ArrayReader] = {}

    def entry(self, name: str) -> TensorEntry:
        try:
            return self.document.tensors[name]
        except KeyError:
            raise UnknownNameError(f"tensor at step {self.document.step}", name, self.document.tensors) from None

    def bits(self, name: str) -> AnyArray:
        """All bits of a tensor, flat, compared with its checksum."""
        entry = self.entry(name)
        bits = self._run(name, entry, 0, entry.size, 0)
        if not bits.flags.writeable:
            bits = bits.copy()
        if checksum_of(bits) != entry.crc32c:
            raise self._corrupt(name, "its checksum does not match")
        return bits

    def values(self, name: str) -> AnyArray:
        entry = self.entry(name)
        return as_values(self.bits(name).reshape(entry.shape), entry.dtype)

    def part(self, name: str, index: Sequence[Index] | Index) -> AnyArray:
        """What `values(name)[index]` is, reading no more than the chunks along the first axis that it needs.

        Each chunk is compared with its own checksum; the whole tensor's cannot be.
        """
        entry = self.entry(name)
        given = (index,) if isinstance(index, int | slice) else tuple(index)
        if len(given) > len(entry.shape):
            raise UsageError(f"{name} has {len(entry.shape)} dimensions; the index has {len(given)}.")
        if not given or not entry.size:
            return np.asarray(self.values(name)[given])
        start, stop = _bounds(given[0], entry.shape[0], name)
        row = entry.size // entry.shape[0]
        bits = self._run(name, entry, start * row, stop * row, 0).reshape(stop - start, *entry.shape[1:])
        if not bits.flags.writeable:
            bits = bits.copy()
        first = given[0] % entry.shape[0] - start if isinstance(given[0], int) else _shifted(given[0], entry.shape[0])
        return np.asarray(as_values(bits, entry.dtype)[(first, *given[1:])])

    def _run(self, name: str, entry: TensorEntry, start: int, stop: int, depth: int) -> AnyArray:
        """A run of a tensor's elements, with the difference to earlier snapshots undone. Not to be changed: it is kept
        for the snapshot that comes next."""
        key = (self.document.step, name, start, stop)
        known = self._recent.get(key)
        if known is not None:
            return known
        run = self._read_run(name, entry, start, stop, depth)
        if entry.delta_of is not None or depth:
            self._recent.keep(key, run)
        return run

    def _read_run(self, name: str, entry: TensorEntry, start: int, stop: int, depth: int) -> AnyArray:
        if depth > MAX_CHAIN:
            raise self._corrupt(name, "its differences go in circles")
        try:
            offset = entry.offset or 0
            stored = self._array(entry.array).elements(offset + start, offset + stop)
        except (DamageError, KeyError) as error:
            raise self._corrupt(name, str(error)) from error
        if entry.delta_of is None:
            return stored
        base = self._base(entry.delta_of)
        before = base.document.tensors.get(name)
        if before is None or before.shape != entry.shape or before.dtype != entry.dtype:
            raise self._corrupt(name, f"step {entry.delta_of}, which it is a difference to, has no such tensor")
        return undo_difference(stored, base._run(name, before, start, stop, depth + 1))

    def _array(self, array: str) -> ArrayReader:
        if array not in self._arrays:
            self._arrays[array] = ArrayReader(
                self.document.arrays[array], lambda key, offset, size: self._read_at(f"{array}/{key}", offset, size)
            )
        return self._arrays[array]

    def _corrupt(self, name: str, why: str) -> CorruptError:
        return CorruptError(f'tensor "{name}" at step {self.document.step} of {self.where} is damaged: {why}.')


def difference(bits: AnyArray, before: AnyArray) -> AnyArray:
    """The bits less those of an earlier snapshot, as integers; small differences of either sign become small numbers.

    >>> difference(np.array([7, 5], np.uint8), np.array([5, 7], np.uint8))
    array([4, 3], dtype=uint8)
    """
    width = bits.dtype.itemsize
    signed = (bits.view(f"u{width}") - before.view(f"u{width}")).view(f"i{width}")
    folded: AnyArray = (signed << 1) ^ (signed >> (8 * width - 1))
    return folded.view(f"u{width}")


def undo_difference(stored: AnyArray, before: AnyArray) -> AnyArray:
    """The bits again, in the type of `before`."""
    width = stored.dtype.itemsize
    one = stored.dtype.type(1)
    signed = (stored >> one) ^ (np.zeros((), stored.dtype) - (stored & one))
    total: AnyArray = signed + before.view(f"u{width}")
    return total.view(before.dtype)


def _sum(content: Any) -> int:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


def _bounds(index: Index, length: int, name: str) -> tuple[int, int]:
    """The run of an axis that an index touches."""
    if isinstance(index, slice):
        touched = range(*index.indices(length))
        return (min(touched[0], touched[-1]), max(touched[0], touched[-1]) + 1) if touched else (0, 0)
    if not -length <= index < length:
        raise UsageError(f"index {index} is outside {name}, whose first axis has {length}.")
    return index % length, index % length + 1


def _shifted(index: slice, length: int) -> slice:
    """The same picks, counted from the first that was read."""
    step = index.indices(length)[2]
    return slice(None, None, step)
