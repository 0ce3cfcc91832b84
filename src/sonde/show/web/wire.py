"""Replies as bytes: JSON without bare NaN, or a JSON header followed by raw little-endian arrays."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAGIC: Final = b"SNB1"
JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
_DTYPES: Final = {"f64": "<f8", "f32": "<f4", "i32": "<i4", "u8": "u1"}
_MAX_DEPTH: Final = 40
_VIEW_PARAMETERS: Final = frozenset({"from", "to", "w", "points", "rows"})


@dataclass(slots=True)
class Reply:
    """A reply and its content type."""

    body: bytes
    media: str
    is_final: bool = True
    """Whether the same request for the same files always gives the same reply, so that it may be cached."""
    is_noise: bool = False
    """Whether only neighbouring bytes repeat, as in images of measurements."""
    _gzipped: bytes = b""

    @property
    def gzipped(self) -> bytes:
        """The compressed body, computed once."""
        if not self._gzipped:
            # Searching for repetitions in noise takes twice the time and saves a twentieth of the bytes.
            strategy = zlib.Z_RLE if self.is_noise else zlib.Z_DEFAULT_STRATEGY
            press = zlib.compressobj(1, zlib.DEFLATED, 31, 9, strategy)
            self._gzipped = press.compress(self.body) + press.flush()
        return self._gzipped


def to_json(value: Any) -> bytes:
    """Strict JSON; non-finite numbers become strings that JavaScript's `Number` understands.

    >>> to_json({"loss": float("nan")})
    b'{"loss":"NaN"}'
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError):
        return json.dumps(_plain(value, 0), allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), depth)
    if isinstance(value, float):
        return number(value)
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    return str(value)


def number(value: float) -> float | str:
    """A number for JSON."""
    if np.isfinite(value):
        return float(value)
    return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def json_reply(value: Any) -> Reply:
    return Reply(to_json(value), JSON)


def binary_reply(header: Mapping[str, Any], buffers: Mapping[str, tuple[str, NDArray[Any]]]) -> Reply:
    """A binary reply. `buffers` maps name -> (type, array); each starts at a multiple of 8 bytes."""
    entries, pieces, offset = [], [], 0
    for name, (dtype, array) in buffers.items():
        data = np.ascontiguousarray(array, _DTYPES[dtype]).reshape(-1)
        entries.append([name, dtype, offset, data.size])
        pieces += [data.tobytes(), bytes(-data.nbytes % 8)]
        offset += data.nbytes + (-data.nbytes % 8)
    return Reply(_container({**header, "buffers": entries}, pieces), BINARY)


def read_binary(body: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Decode a `binary_reply`, for tests and Python clients."""
    magic, length = struct.unpack_from("<4sI", body)
    if magic != MAGIC:
        raise ValueError("not a reply of sonde")
    header = json.loads(body[8 : 8 + length])
    found = {}
    for name, dtype, offset, size in header.get("buffers", ()):
        found[name] = np.frombuffer(body, _DTYPES[dtype], size, 8 + length + offset)
    return header, found


def pack(answers: Mapping[str, bytes]) -> bytes:
    """Pack replies by path into one container, for a self-contained report; to be gzipped and base64-encoded."""
    entries, offset = [], 0
    for path, body in answers.items():
        entries.append([report_key(path), offset, len(body)])
        offset += len(body)
    return _container({"answers": entries}, list(answers.values()))


def report_key(path: str) -> str:
    """The key under which a report stores a reply; the same function is in web/src/lib/api.ts.

    >>> report_key("/api/runs/a/heat?w=100&stat=rms&kind=grad")
    '/api/runs/a/heat?kind=grad&stat=rms'
    """
    where, _, query = path.partition("?")
    kept = sorted(part for part in query.split("&") if part and part.partition("=")[0] not in _VIEW_PARAMETERS)
    return f"{where}?{'&'.join(kept)}" if kept else where


def _container(header: Mapping[str, Any], pieces: list[bytes]) -> bytes:
    text = to_json(header)
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<4sI", MAGIC, len(text)), text, *pieces])
