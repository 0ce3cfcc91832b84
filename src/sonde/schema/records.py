"""The records that go from the training thread to disk, and their bytes in the log. No I/O.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.distribution import DISTRIBUTION
from sonde.errors import FormatError
from sonde.schema.attempts import Mark
from sonde.schema.layout import FORMAT_VERSION, UNSHARDED_VERSION
from sonde.schema.sketch import NUM_BINS, NUM_FIELDS, Array

LOG_MAGIC: Final = b"SONDELOG"
FRAME_MAGIC: Final = b"SNDF"
_LOG_HEADER: Final = struct.Struct("<8sII")
_FRAME_HEADER: Final = struct.Struct("<4sII")
_BODY_HEADER: Final = struct.Struct("<QB")
_STATS_HEADER: Final = struct.Struct("<qdII")
_MARKED_HEADER: Final = struct.Struct("<qqIB")
LOG_HEADER_SIZE: Final = _LOG_HEADER.size
MAX_FRAME_BYTES: Final = 1 << 30
_MAX_DEPTH: Final = 32
_SIGNATURE: Final = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\s*\Z')

STATS_FRAME: Final = 1
SCALARS_FRAME: Final = 2
"""A frame of format 1, without a mark."""
MARKED_SCALARS_FRAME: Final = 3

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a tensor that one rank records. Ranks that hold the same part are replicas, and one of them counts.

    `how` the parts make the whole: "shard" (each element is in one part), "sum" (the whole is their sum), or "batch"
    (each part comes from other samples).
    """

    part: int
    parts: int
    how: str = "shard"


@dataclass(frozen=True, slots=True)
class StatsRecord:
    """Sketches of many sites at one step. `hist` rows belong to the sites at `hist_index`."""

    step: int
    time: float
    site_ids: NDArray[np.int32]
    rows: Array
    hist_index: NDArray[np.int32]
    hist: NDArray[np.float32]

    @property
    def last_step(self) -> int:
        return self.step

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
    counted: NDArray[np.int64] | None = None
    """The current step, if the user logs by their own count that is ahead of it; None if no row is ahead."""

    @property
    def last_step(self) -> int:
        return int(self.steps.max(initial=-1))

    @property
    def made_at(self) -> NDArray[np.int64]:
        """The step that decides whether a row is kept or abandoned."""
        return self.steps if self.counted is None else np.minimum(self.steps, self.counted)

    def where(self, keep: NDArray[np.bool_]) -> ScalarsRecord:
        counted = None if self.counted is None else self.counted[keep]
        return ScalarsRecord(self.name_ids[keep], self.steps[keep], self.times[keep], self.values[keep], counted)

    @staticmethod
    def empty() -> ScalarsRecord:
        return ScalarsRecord(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0), np.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A single event: a skipped step, dropped rows, a changed recording schedule, an internal failure."""

    type: str
    message: str
    step: int
    time: float
    severity: Severity = "info"
    details: dict[str, Any] = field(default_factory=dict)


LOSSES: Final = (
    "warning", "damaged", "lost", "record_failed", "measurement_failed", "switched_off", "observer_failed", "gap",
    "snapshot_skipped", "snapshot_lost", "snapshot_failed",
)  # fmt: skip
"""Types of events about data that was not recorded as requested: `Run.warnings` lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSample:
    """One sample of system metrics. Numbers that could not be read are absent."""

    time: float
    step: int
    values: dict[str, float]


def log_header() -> bytes:
    """The first bytes of every log."""
    version = UNSHARDED_VERSION  # logs are the same in format 3
    return _LOG_HEADER.pack(LOG_MAGIC, version, zlib.crc32(LOG_MAGIC + version.to_bytes(4, "little")))


def check_log_header(data: bytes) -> bool:
    """Whether these bytes start a log we can read; a newer format is an error with the remedy."""
    if len(data) < LOG_HEADER_SIZE:
        return False
    magic, version, crc = _LOG_HEADER.unpack_from(data)
    if magic != LOG_MAGIC or crc != zlib.crc32(LOG_MAGIC + int(version).to_bytes(4, "little")):
        return False
    if version > FORMAT_VERSION:
        raise FormatError(
            f"this run has format {version}; this version of sonde reads up to {FORMAT_VERSION}. Run:  pip install "
            f"-U {DISTRIBUTION}"
        )
    return True


def encode_frame(sequence: int, record: StatsRecord | ScalarsRecord, mark: Mark = Mark()) -> bytes:  # noqa: B008 - frozen
    """One record as one frame. The mark belongs to a frame of scalars."""
    kind, payload = (
        (STATS_FRAME, _encode_stats(record))
        if isinstance(record, StatsRecord)
        else (MARKED_SCALARS_FRAME, _encode_scalars(record, mark))
    )
    body = [_BODY_HEADER.pack(sequence, kind), *payload]
    length, crc = 0, 0
    for part in body:  # each is copied once, by `join`
        length += len(part)
        crc = zlib.crc32(part, crc)
    return b"".join((_FRAME_HEADER.pack(FRAME_MAGIC, length, crc), *body))


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame and the offset just after it."""

    sequence: int
    record: StatsRecord | ScalarsRecord
    end: int
    mark: Mark | None = None


def decode_frames(data: bytes | memoryview, start: int = 0) -> Iterator[Frame]:
    """Frames from `start` (after the log's header) up to the first that is incomplete or damaged."""
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
            record, mark = _decode(kind, body[_BODY_HEADER.size :])
        except (ValueError, struct.error):  # a valid checksum over an invalid body was made on purpose
            return
        if record is not None:
            yield Frame(sequence, record, end, mark)
        position = end


def _decode(kind: int, payload: memoryview) -> tuple[StatsRecord | ScalarsRecord | None, Mark | None]:
    """A record and its mark; no record for a frame type of a later version of sonde."""
    if kind == STATS_FRAME:
        return _decode_stats(payload), None
    if kind == MARKED_SCALARS_FRAME:
        return _decode_marked(payload)
    if kind == SCALARS_FRAME:
        return _decode_scalars(payload), None
    return None, None


def _encode_stats(record: StatsRecord) -> list[bytes | memoryview]:
    return [
        _STATS_HEADER.pack(record.step, record.time, len(record.site_ids), len(record.hist_index)),
        _bytes_of(record.site_ids, "<i4"),
        _bytes_of(record.rows, "<f8"),
        _bytes_of(record.hist_index, "<i4"),
        _bytes_of(record.hist, "<f4"),
    ]


def _bytes_of(column: NDArray[Any], dtype: str) -> memoryview:
    """Its bytes, row by row, without a copy if possible."""
    return np.ascontiguousarray(column, dtype).reshape(-1).view(np.uint8).data


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
        raise ValueError("a histogram refers to a row that does not exist")
    return record


def _encode_scalars(record: ScalarsRecord, mark: Mark) -> list[bytes | memoryview]:
    counted = record.counted
    return [
        _MARKED_HEADER.pack(mark.complete, mark.visible, len(record.name_ids), counted is not None),
        _bytes_of(record.name_ids, "<i4"),
        _bytes_of(record.steps, "<i8"),
        _bytes_of(record.times, "<f8"),
        _bytes_of(record.values, "<f8"),
        b"" if counted is None else _bytes_of(counted, "<i8"),
    ]


def _decode_marked(payload: memoryview) -> tuple[ScalarsRecord, Mark]:
    complete, visible, count, has_counted = _MARKED_HEADER.unpack_from(payload)
    take = _Columns(payload, _MARKED_HEADER.size)
    return _take_scalars(take, count, has_counted=bool(has_counted)), Mark(complete, visible)


def _decode_scalars(payload: memoryview) -> ScalarsRecord:
    (count,) = struct.unpack_from("<I", payload)
    return _take_scalars(_Columns(payload, 4), count, has_counted=False)


def _take_scalars(take: _Columns, count: int, *, has_counted: bool) -> ScalarsRecord:
    columns = take("<i4", count), take("<i8", count), take("<f8", count), take("<f8", count)
    return ScalarsRecord(*columns, take("<i8", count) if has_counted else None)


class _Columns:
    """Reads one column after another."""

    def __init__(self, payload: memoryview, offset: int) -> None:
        self.payload, self.offset = payload, offset

    def __call__(self, dtype: str, count: int) -> NDArray[Any]:
        column = np.frombuffer(self.payload, dtype, count, self.offset)
        self.offset += column.nbytes
        return column


def sign_document(text: str) -> str:
    """A JSON object with a checksum of itself as its last member: JSON with a flipped bit is usually still JSON.

    >>> sign_document('{"lr": 0.1}')
    '{"lr": 0.1, "crc32": "c2e28f68"}\\n'
    """
    body = text.rstrip().removesuffix("}")
    return f'{body}, "crc32": "{zlib.crc32(body.encode()):08x}"}}\n'


def check_document(data: bytes) -> bool:
    """Whether a document matches its signature; one without a signature is accepted."""
    match = _SIGNATURE.search(data)
    return match is None or zlib.crc32(data[: match.start()]) == int(match.group(1), 16)


def to_json(value: Any) -> str:
    """JSON without bare NaN, for anything a user may put into a config; values that JSON lacks become their `str`."""
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
    found = fields_of(value)
    if found is not None:
        return {_jsonable(text_of(key)): _jsonable(item, inner) for key, item in found.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item, inner) for item in value]
    if isinstance(value, np.generic):
        return _jsonable(value.item(), inner)
    return _jsonable(text_of(value))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Leaves by dotted path, as JSON.

    >>> flatten({"optim": {"lr": 0.1}})
    {'optim.lr': '0.1'}
    """
    leaves: dict[str, str] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, f"{path}."))
        else:
            leaves[path] = to_json(value)
    return leaves


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """The contents of a mapping, a dataclass or a namespace, by name; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    # By name: importing argparse takes time, and only a program that has imported it can have created one.
    return (
        vars(value) if type(value).__name__ in ("Namespace", "SimpleNamespace") and hasattr(value, "__dict__") else None
    )


def text_of(value: Any) -> str:
    """Its text, even if its `__str__` fails."""
    try:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    except Exception as error:  # noqa: BLE001  it is the user's object, and may do anything
        return f"<{type(value).__name__}: {type(error).__name__} in str()>"
