"""Parsing and checking of run.json: wrong types and newer formats are refused with a message. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from sonde.distribution import DISTRIBUTION
from sonde.errors import CorruptError, FormatError, NotARunError
from sonde.schema.layout import FORMAT_VERSION, RunStatus, Stream
from sonde.schema.records import check_document

_STATUSES: Final[tuple[RunStatus, ...]] = get_args(RunStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The writer's last report about itself."""

    time: float = 0.0
    step: int = -1
    acknowledged: Mapping[str, int] = field(default_factory=dict)
    """Per stream, the sequence of the last frame that is safely on disk; absent if none is."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Per stream, the number of records that will not be on disk."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """Those of them that could not be created or encoded; the others were dropped because the queue was full."""
    degraded: str = ""
    attempt: int = -1
    """The last attempt in the catalog; -1 if there was none, as in format 1."""

    def last_acknowledged(self, stream: Stream) -> int:
        return self.acknowledged.get(stream, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of run.json. `status` is what the writer wrote last; for the true status see `status.py`."""

    id: str
    name: str
    project: str
    status: RunStatus
    reason: str = ""
    created: str = ""
    created_time: float = 0.0
    ended_time: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    notes: str = ""
    command: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    git: Mapping[str, Any] | None = None
    host: str = ""
    pid: int = 0
    rank: int = 0
    world_size: int = 1
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    facts: Mapping[str, Any] = field(default_factory=dict)


def parse_manifest(text: bytes, *, where: str) -> Manifest:
    """Check and convert the document; `where` is used in errors."""
    if not check_document(text):
        raise CorruptError(
            f"{where} is damaged: its checksum does not match. Restore it from a backup to open the run."
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{where} is damaged ({error}). The run cannot be read without it. Restore it from a backup."
        ) from error
    if not isinstance(document, dict) or "format" not in document or "id" not in document:
        raise NotARunError(f"{where} does not describe a run: it has no format and id.")
    take = _Taker(document, where)
    version = take.whole("format")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{where}: this run has format {version}, but this version of sonde reads only up to {FORMAT_VERSION}. "
            f"Update it:  pip install -U {DISTRIBUTION}"
        )
    return Manifest(
        id=take.text("id"),
        name=take.text("name"),
        project=take.text("project"),
        status=take.status(),
        reason=take.text("reason"),
        created=take.text("created"),
        created_time=take.number("created_time"),
        ended_time=None if document.get("ended_time") is None else take.number("ended_time"),
        config=take.mapping("config"),
        tags=take.texts("tags"),
        notes=take.text("notes"),
        command=take.texts("command"),
        environment=take.mapping("environment"),
        git=None if document.get("git") is None else take.mapping("git"),
        host=take.text("host"),
        pid=take.whole("pid"),
        rank=take.whole("rank"),
        world_size=take.whole("world_size", 1),
        heartbeat=_heartbeat(take.mapping("heartbeat"), where),
        facts=take.mapping("facts"),
    )


def _heartbeat(document: Mapping[str, Any], where: str) -> Heartbeat:
    take = _Taker(document, f"{where}: heartbeat")
    return Heartbeat(
        time=take.number("time"),
        step=take.whole("step", -1),
        acknowledged=take.counts("acknowledged"),
        dropped=take.counts("dropped"),
        failed=take.counts("failed"),
        degraded=take.text("degraded"),
        attempt=take.whole("attempt", -1),
    )


class _Taker:
    """Takes typed values out of a document; absent and null give the default, a wrong type is an error."""

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self.document, self.where = document, where

    def _take(self, key: str, types: type | tuple[type, ...], expected: str, default: Any) -> Any:
        value = self.document.get(key)
        if value is None:
            return default
        if not isinstance(value, types) or isinstance(value, bool):
            raise CorruptError(f'{self.where}: "{key}" should be {expected}, but is {type(value).__name__}.')
        return value

    def text(self, key: str) -> str:
        value: str = self._take(key, str, "text", "")
        return value

    def status(self) -> RunStatus:
        value = self.text("status")
        for status in _STATUSES:
            if value == status:
                return status
        raise CorruptError(f'{self.where}: "status" is {value!r}; it should be one of {", ".join(_STATUSES)}.')

    def whole(self, key: str, default: int = 0) -> int:
        value: int = self._take(key, int, "an integer", default)
        return value

    def number(self, key: str) -> float:
        try:
            return float(self._take(key, (int, float), "a number", 0.0))
        except OverflowError:
            raise CorruptError(f'{self.where}: "{key}" is too large.') from None

    def mapping(self, key: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._take(key, dict, "an object", {})
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._take(key, list, "a list of strings", [])
        if not all(isinstance(value, str) for value in values):
            raise CorruptError(f'{self.where}: "{key}" should be a list of strings.')
        return tuple(values)

    def counts(self, key: str) -> dict[str, int]:
        inner = _Taker(self.mapping(key), f"{self.where}: {key}")
        return {name: inner.whole(name) for name in inner.document if inner.document[name] is not None}
