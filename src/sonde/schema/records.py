"""The records that travel from the training thread to disk, and their bytes in the log. No I/O.

A log is a header and frames. A frame is

    magic "SNDF" | u32 length of the body | u32 crc32 of the body | body
    body = u64 sequence | u8 type | payload

Everything is little-endian. A reader stops at the first frame whose magic, length, checksum or inner counts are wrong.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.errors import FormatError
from sonde.schema.layout import FORMAT_VERSION
from sonde.schema.sketch import NUM_BINS, NUM_FIELDS, Array

LOG_MAGIC: Final = b"SONDELOG"
FRAME_MAGIC: Final = b"SNDF"
_LOG_HEADER: Final = struct.Struct("<8sII")
_FRAME_HEADER: Final = struct.Struct("<4sII")
_BODY_HEADER: Final = struct.Struct("<QB")
_STATS_HEADER: Final = struct.Struct("<qdII")
LOG_HEADER_SIZE: Final = _LOG_HEADER.size
MAX_FRAME_BYTES: Final = 1 << 30
_MAX_DEPTH: Final = 32
_SIGNATURE: Final = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\s*\Z')

STATS_FRAME: Final = 1
SCALARS_FRAME: Final = 2

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place that is measured. `aliases` are its other names: tied weights, shared modules."""

    kind: str
    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    owner: str = ""
    """The module the site belongs to."""
    module_type: str = ""
    """The class of that module: `Linear`, `LayerNorm`."""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StatsRecord:
    """Sketches of many sites at one step. `hist` rows belong to the sites at `hist_index`."""

    step: int
    time: float
    site_ids: NDArray[np.int32]
    rows: Array
    hist_index: NDArray[np.int32]
    hist: NDArray[np.float32]

    @staticmethod
    def without_hist(step: int, time: float, site_ids: NDArray[np.int32], rows: Array) -> StatsRecord:
        return StatsRecord(step, time, site_ids, rows, np.empty(0, np.int32), np.empty((0, NUM_BINS), np.float32))


@dataclass(frozen=True, slots=True)
class ScalarsRecord:
    """Logged numbers: parallel columns."""

    name_ids: NDArray[np.int32]
    steps: NDArray[np.int64]
    times: Array
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened once: a skipped step, dropped rows, a change of cadence, a failure of ours."""

    type: str
    message: str
    step: int
    time: float
    severity: Severity = "info"
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSample:
    """One reading of the machine. Numbers that could not be read are absent."""

    time: float
    step: int
    values: dict[str, float]


def log_header() -> bytes:
    """The first bytes of every log."""
    return _LOG_HEADER.pack(LOG_MAGIC, FORMAT_VERSION, zlib.crc32(LOG_MAGIC + FORMAT_VERSION.to_bytes(4, "little")))


def check_log_header(data: bytes) -> bool:
    """Whether these bytes begin a log we can read; a newer format is an error with the remedy."""
    if len(data) < LOG_HEADER_SIZE:
        return False
    magic, version, crc = _LOG_HEADER.unpack_from(data)
    if magic != LOG_MAGIC or crc != zlib.crc32(LOG_MAGIC + int(version).to_bytes(4, "little")):
        return False
    if version > FORMAT_VERSION:
        raise FormatError(
            f"this run has format {version}; this sonde reads up to {FORMAT_VERSION}. Run:  pip install -U sonde"
        )
    return True


def encode_frame(sequence: int, record: StatsRecord | ScalarsRecord) -> bytes:
    """One record as one frame."""
    kind, payload = (
        (STATS_FRAME, _encode_stats(record))
        if isinstance(record, StatsRecord)
        else (SCALARS_FRAME, _encode_scalars(record))
    )
    body = _BODY_HEADER.pack(sequence, kind) + payload
    return _FRAME_HEADER.pack(FRAME_MAGIC, len(body), zlib.crc32(body)) + body


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame and the offset just behind it."""

    sequence: int
    record: StatsRecord | ScalarsRecord
    end: int


def decode_frames(data: bytes | memoryview, start: int = 0) -> Iterator[Frame]:
    """Frames from `start` (behind the log's header) up to the first that is incomplete or damaged."""
    view = memoryview(data)
    position = start
    while position + _FRAME_HEADER.size <= len(view):
        magic, length, crc = _FRAME_HEADER.unpack_from(view, position)
        end = position + _FRAME_HEADER.size + length
        if magic != FRAME_MAGIC or length < _BODY_HEADER.size or length > MAX_FRAME_BYTES or end > len(view):
            return
        body = view[position + _FRAME_HEADER.size : end]
        if zlib.crc32(body) != crc:
            return
        sequence, kind = _BODY_HEADER.unpack_from(body)
        try:
            record = _decode(kind, body[_BODY_HEADER.size :])
        except (ValueError, struct.error):  # a right checksum over a wrong body: somebody made it so
            return
        if record is not None:
            yield Frame(sequence, record, end)
        position = end


def _decode(kind: int, payload: memoryview) -> StatsRecord | ScalarsRecord | None:
    """A record, or None for a type of frame that a later sonde added."""
    if kind == STATS_FRAME:
        return _decode_stats(payload)
    if kind == SCALARS_FRAME:
        return _decode_scalars(payload)
    return None


def _encode_stats(record: StatsRecord) -> bytes:
    return b"".join(
        (
            _STATS_HEADER.pack(record.step, record.time, len(record.site_ids), len(record.hist_index)),
            record.site_ids.astype("<i4", copy=False).tobytes(),
            record.rows.astype("<f8", copy=False).tobytes(),
            record.hist_index.astype("<i4", copy=False).tobytes(),
            record.hist.astype("<f4", copy=False).tobytes(),
        )
    )


def _decode_stats(payload: memoryview) -> StatsRecord:
    step, time, num_rows, num_hists = _STATS_HEADER.unpack_from(payload)
    take = _Columns(payload, _STATS_HEADER.size)
    record = StatsRecord(
        step,
        time,
        take("<i4", num_rows),
        take("<f8", num_rows * NUM_FIELDS).reshape(num_rows, NUM_FIELDS),
        take("<i4", num_hists),
        take("<f4", num_hists * NUM_BINS).reshape(num_hists, NUM_BINS),
    )
    if num_hists and not (record.hist_index.min() >= 0 and record.hist_index.max() < num_rows):
        raise ValueError("a histogram belongs to a row that is not there")
    return record


def _encode_scalars(record: ScalarsRecord) -> bytes:
    return b"".join(
        (
            struct.pack("<I", len(record.name_ids)),
            record.name_ids.astype("<i4", copy=False).tobytes(),
            record.steps.astype("<i8", copy=False).tobytes(),
            record.times.astype("<f8", copy=False).tobytes(),
            record.values.astype("<f8", copy=False).tobytes(),
        )
    )


def _decode_scalars(payload: memoryview) -> ScalarsRecord:
    (count,) = struct.unpack_from("<I", payload)
    take = _Columns(payload, 4)
    return ScalarsRecord(take("<i4", count), take("<i8", count), take("<f8", count), take("<f8", count))


class _Columns:
    """Reads one column after another."""

    def __init__(self, payload: memoryview, offset: int) -> None:
        self.payload, self.offset = payload, offset

    def __call__(self, dtype: str, count: int) -> NDArray[Any]:
        column = np.frombuffer(self.payload, dtype, count, self.offset)
        self.offset += column.nbytes
        return column


def sign_document(text: str) -> str:
    """A JSON object with a checksum of itself as its last member: a flipped bit in JSON is mostly still JSON.

    >>> sign_document('{"lr": 0.1}')
    '{"lr": 0.1, "crc32": "c2e28f68"}\\n'
    """
    body = text.rstrip().removesuffix("}")
    return f'{body}, "crc32": "{zlib.crc32(body.encode()):08x}"}}\n'


def check_document(data: bytes) -> bool:
    """Whether a document is as it was signed; one without a signature is taken as it is."""
    match = _SIGNATURE.search(data)
    return match is None or zlib.crc32(data[: match.start()]) == int(match.group(1), 16)


def to_json(value: Any) -> str:
    """JSON without bare NaN, for anything a user may put into a config; what JSON lacks becomes its `str`."""
    return json.dumps(_jsonable(value), allow_nan=False, ensure_ascii=False, sort_keys=False)


def _jsonable(value: Any, inside: tuple[int, ...] = ()) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if id(value) in inside or len(inside) > _MAX_DEPTH:  # a config that contains itself
        return "…"
    inner = (*inside, id(value))
    if isinstance(value, dict):
        return {_jsonable(str(key)): _jsonable(item, inner) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item, inner) for item in value]
    if isinstance(value, np.generic):
        return _jsonable(value.item(), inner)
    return _jsonable(str(value))
