"""The catalog of a run: sites, names, segments, events, system metrics. One writing connection, in the writer thread.

Write-ahead log with synchronous=FULL: a commit survives a power loss, readers never block the writer, and a killed
writer leaves nothing that a read-only connection would have to roll back. SQLite up to 3.51.2 can damage a write-ahead
log that two connections checkpoint at once; only this connection writes, so only this one checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from sonde.errors import CorruptError
from sonde.schema.attempts import Attempt, Mark
from sonde.schema.layout import ATTEMPT_TABLES, CATALOG_FILE, CATALOG_SCHEMA, Stream, row_text, snapshot_row_id
from sonde.schema.old_names import current_scalar
from sonde.schema.records import Event, Shard, Site, SystemSample, to_json
from sonde.write.items import FindingRow, KeptRow
from sonde.write.storable import storable_site, storable_text

Row = tuple[str, Sequence[Any]]
"""A table, or a kind of row in it, and the values of its columns."""

_STATEMENTS: Final = {
    "sites": "insert or replace into sites values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "shards": "insert or replace into shards values (?, ?, ?, ?, ?)",
    "scalar_names": "insert or replace into scalar_names values (?, ?, ?)",
    "segments": "insert into segments values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "attempts": "insert or replace into attempts values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "events": "insert into events (time, step, type, severity, message, details, attempt) values (?, ?, ?, ?, ?, ?, ?)",
    "findings": "insert or replace into findings values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "checkpoints": "insert into checkpoints (step, time, path, metrics, attempt) values (?, ?, ?, ?, ?)",
    "snapshots": "insert or replace into snapshots values (?, ?, ?, ?, ?, ?)",
    "found snapshots": "insert or ignore into snapshots values (?, ?, ?, ?, ?, ?)",
    "system_metrics": "insert into system_metrics values (?, ?, ?, ?, ?)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A sealed file; `tiles` are (first site, last site, first step, last step) per row group."""

    id: int
    stream: Stream
    rank: int
    level: int
    file: str
    """Path inside the run folder."""
    num_rows: int
    first_sequence: int
    last_sequence: int
    first_step: int
    last_step: int
    sha256: str
    tiles: str


class Committer(Protocol):
    """A catalog, as those see it that only add rows."""

    def commit(self, rows: Iterable[Row]) -> None:
        """Write all of the rows or none; they are durable when this returns."""


class CatalogRows(ABC):
    """Rows that an earlier process of this rank wrote. Each ends with its checksum."""

    path: Path

    @abstractmethod
    def _stored(self, table: str) -> Sequence[Sequence[Any]]:
        """The rows of a table by id, with their checksums."""

    def _checked(self, table: str) -> list[Sequence[Any]]:
        rows = self._stored(table)
        for row in rows:
            if zlib.crc32(row_text(*row[:-1])) != row[-1]:
                raise CorruptError(
                    f"{self.path}: row {row[0]} of table {table} does not match its checksum. "
                    "This run cannot be resumed; start a new one (intact data can still be read)."
                )
        return [row[:-1] for row in rows]

    def sites(self) -> dict[int, Site]:
        return _sites_of(self._checked("sites"))

    def shards(self) -> dict[int, Shard]:
        """The parts of sharded sites that this process holds, by site."""
        return _shards_of(self._checked("shards"))

    def scalar_names(self) -> dict[int, str]:
        """Names by id, in their current form: a run of an earlier version continues its existing series."""
        return {id: current_scalar(name) for id, name in self._checked("scalar_names")}

    def segments(self) -> list[Segment]:
        """Every sealed file, in order of sealing."""
        return _segments_of(self._checked("segments"))

    def attempts(self) -> list[Attempt]:
        """Attempts in order; a run of format 1 has no row."""
        return _attempts_of(self._checked("attempts"))


class Catalog(CatalogRows):
    """Use from one thread only."""

    def __init__(self, run: Path) -> None:
        self.path = run / CATALOG_FILE
        self._connection: sqlite3.Connection | None = None
        self._connect()

    def next_finding(self) -> int:
        """The first finding number that no earlier session has used."""
        connection = self._connection or self._connect()
        (number,) = connection.execute("select coalesce(max(id), 0) + 1 from findings").fetchone()
        return int(number)

    def commit(self, rows: Iterable[Row]) -> None:
        """Write all of the rows or none; they are durable when this returns."""
        connection = self._connection or self._connect()
        try:
            connection.execute("begin immediate")
            for table, values in rows:
                connection.execute(_STATEMENTS[table], values)
            connection.execute("commit")
        except BaseException:
            # After an I/O error, a fresh connection reads what is really on disk.
            self._drop()
            raise

    def close(self) -> None:
        """Leave one plain file, which read-only media can hold. With a reader present, the log stays next to it."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("pragma busy_timeout = 0")
                self._connection.execute("pragma journal_mode = delete")
            self._drop()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=5.0)
        try:
            connection.execute("pragma synchronous = full")
            connection.execute("pragma journal_mode = wal")
            _drop_early_table(connection)
            connection.executescript(CATALOG_SCHEMA)
            _add_attempts(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.rollback()
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _stored(self, table: str) -> list[tuple[Any, ...]]:
        connection = self._connection or self._connect()
        return connection.execute(f"select * from {table} order by id").fetchall()  # noqa: S608  our own table names


def _drop_early_table(connection: sqlite3.Connection) -> None:
    """Runs from before there were snapshots have an unused table for them that has no checksum."""
    columns = {column for _, column, *_ in connection.execute("pragma table_info(snapshots)")}
    if columns and "crc" not in columns:
        connection.execute("drop table snapshots")


def _add_attempts(connection: sqlite3.Connection) -> None:
    """Rows of format 1 belong to the first attempt."""
    for table in ATTEMPT_TABLES:
        if "attempt" not in {column for _, column, *_ in connection.execute(f"pragma table_info({table})")}:
            connection.execute(f"alter table {table} add column attempt integer not null default 0")


def _sites_of(rows: Iterable[Sequence[Any]]) -> dict[int, Site]:
    """Sites from checked rows, without their checksum."""
    return {
        id: Site(
            kind=kind,
            name=name,
            shape=tuple(json.loads(shape)),
            dtype=dtype,
            owner=owner,
            module_type=module_type,
            aliases=tuple(json.loads(aliases)),
        )
        for id, kind, name, shape, dtype, owner, module_type, aliases in rows
    }


def _shards_of(rows: Iterable[Sequence[Any]]) -> dict[int, Shard]:
    return {id: Shard(part=part, parts=parts, how=how) for id, part, parts, how in rows}


def _segments_of(rows: Iterable[Sequence[Any]]) -> list[Segment]:
    names = Segment.__dataclass_fields__
    return [Segment(**dict(zip(names, row, strict=True))) for row in rows]


def _attempts_of(rows: Iterable[Sequence[Any]]) -> list[Attempt]:
    return [
        Attempt(
            number=number,
            rank=rank,
            first_step=first_step,
            time=time,
            reason=reason,
            stats_sequence=stats_sequence,
            scalars_sequence=scalars_sequence,
            mark=Mark(complete, visible),
        )
        for number, rank, first_step, time, reason, stats_sequence, scalars_sequence, complete, visible in rows
    ]


def _with_crc(*columns: Any) -> tuple[Any, ...]:
    return (*columns, zlib.crc32(row_text(*columns)))


def site_row(id: int, site: Site) -> Row:
    return "sites", _with_crc(
        id,
        storable_site(site.kind),
        storable_site(site.name),
        to_json(site.shape),
        storable_text(site.dtype),
        storable_text(site.owner),
        storable_text(site.module_type),
        to_json(site.aliases),
    )


def shard_row(id: int, shard: Shard) -> Row:
    return "shards", _with_crc(id, shard.part, shard.parts, shard.how)


def scalar_row(id: int, name: str) -> Row:
    return "scalar_names", _with_crc(id, name)


def segment_row(segment: Segment) -> Row:
    return "segments", _with_crc(*(getattr(segment, name) for name in Segment.__dataclass_fields__))


def attempt_row(attempt: Attempt) -> Row:
    return "attempts", _with_crc(
        attempt.number,
        attempt.rank,
        attempt.first_step,
        attempt.time,
        attempt.reason,
        attempt.stats_sequence,
        attempt.scalars_sequence,
        attempt.mark.complete,
        attempt.mark.visible,
    )


def event_row(event: Event, attempt: int) -> Row:
    details = to_json(event.details)
    return "events", (
        float(event.time),
        int(event.step),
        storable_text(event.type),
        event.severity,
        storable_text(event.message),
        details,
        attempt,
    )


def finding_row(id: int, found: FindingRow, attempt: int) -> Row:
    return "findings", (
        id,
        float(found.time),
        storable_text(found.rule),
        found.severity,
        float(found.confidence),
        int(found.step),
        int(found.last_step),
        to_json(found.sites),
        storable_text(found.message),
        to_json(found.evidence),
        storable_text(found.remedy),
        attempt,
    )


def kept_row(kept: KeptRow, attempt: int) -> Row:
    step, time, where = int(kept.step), float(kept.time), storable_text(kept.where)
    if kept.table == "checkpoints":
        return kept.table, (step, time, where, to_json(kept.details), attempt)
    id = snapshot_row_id(attempt, step)
    return f"found {kept.table}" if kept.is_found else kept.table, _with_crc(
        id, step, time, where, to_json({**kept.details, "attempt": attempt})
    )


def system_rows(sample: SystemSample, attempt: int) -> list[Row]:
    return [
        ("system_metrics", (sample.time, sample.step, name, value, attempt)) for name, value in sample.values.items()
    ]
