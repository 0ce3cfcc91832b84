"""The catalog: sites, names of scalars, segments, events. Opened read-only; rows with a wrong checksum are not used."""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from sonde.errors import CorruptError
from sonde.read.run.folder import inside, open_inside
from sonde.schema.attempts import NO_LIMIT, REASONS, Attempt, Mark
from sonde.schema.layout import (
    ATTEMPT_TABLES,
    CATALOG_FILE,
    RANK_CATALOG_FILE,
    STREAMS,
    Stream,
    pyramid_folder,
    row_text,
    snapshot_row_attempt,
    stream_folder,
)
from sonde.schema.old_names import current_scalar
from sonde.schema.records import Shard, Site, check_document
from sonde.schema.snapshots.tensors import SnapshotKey

MAX_ROWS: Final = 10_000_000
MAX_CATALOG_BYTES: Final = 1 << 30
_TIMEOUT_S: Final = 5.0
_CHECKED: Final = ("sites", "shards", "scalar_names", "segments", "attempts")
_SIDECARS: Final = ("-wal", "-shm", "-journal")

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Tile:
    """The bounds of one row group."""

    first_site: int
    last_site: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One sealed file. `parts` is its path inside the run folder; empty `tiles` mean that its index is unusable."""

    stream: Stream
    rank: int
    level: int
    parts: tuple[str, ...]
    num_rows: int
    first_sequence: int
    last_sequence: int
    first_step: int
    last_step: int
    sha256: str
    tiles: tuple[Tile, ...]
    attempt: int = 0
    since: int = -NO_LIMIT
    """Rows below this step are hidden: a coarser file of the pyramid has them."""
    until: int = NO_LIMIT
    """Rows from this step on are hidden: their attempt was abandoned there, or killed in the middle of a step."""

    @property
    def is_whole(self) -> bool:
        """Whether all of its rows are visible."""
        return self.since <= self.first_step and self.last_step < self.until

    @property
    def name(self) -> str:
        return "/".join(self.parts)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The parts of the catalog that are needed to read series, and the problems found in it."""

    sites: dict[int, Site] = field(default_factory=dict)
    shards: dict[int, Shard] = field(default_factory=dict)
    """By site: the part of it that this rank recorded; none for sites that it recorded whole."""
    scalar_names: dict[int, str] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    """Attempts in order; none in a run of format 1."""
    problems: tuple[str, ...] = ()
    error: CorruptError | None = None
    """The error if the catalog could not be read."""
    missing_files: tuple[str, ...] = ()
    """Sealed files of recorded values that no longer exist."""

    @property
    def is_complete(self) -> bool:
        """Whether the catalog can be read and every file that it lists exists."""
        return self.error is None and not self.missing_files

    def require(self) -> Catalog:
        """Return the catalog, or raise its error: without a catalog rows have no names, so nothing can be shown."""
        if self.error is not None:
            raise self.error
        return self


def read_catalog(run: Path, *, is_live: bool) -> Catalog:
    """Read the tables with checksums. A catalog that does not exist yet is empty."""
    problems: list[str] = []
    if (run / RANK_CATALOG_FILE).exists():
        lines = read_lines(run)
        rows = {table: _good_rows(lines.get(table, []), table, problems) for table in _CHECKED}
    elif (run / CATALOG_FILE).exists():
        with connect(run, is_live=is_live) as connection:
            rows = {table: _checked_rows(connection, table, problems) for table in _CHECKED}
    else:
        return Catalog()
    sites = _parsed(_site, rows["sites"], "sites", problems)
    names = _parsed(lambda row: current_scalar(str(row[1])), rows["scalar_names"], "scalar_names", problems)
    segments = _parsed(partial(_segment, run), rows["segments"], "segments", problems)
    attempts = _all_attempts(run, rows["attempts"], problems)
    return Catalog(
        sites=sites,
        shards=_parsed(_shard, rows["shards"], "shards", problems),
        scalar_names=names,
        segments=tuple(segments[id] for id in sorted(segments)),
        attempts=attempts,
        problems=tuple(problems),
    )


def read_attempts(run: Path, *, is_live: bool) -> tuple[Attempt, ...]:
    """Read only the attempts, in order; none in a run of format 1."""
    if not (run / CATALOG_FILE).exists():
        return ()
    problems: list[str] = []
    with connect(run, is_live=is_live) as connection:
        rows = _checked_rows(connection, "attempts", problems)
    return _all_attempts(run, rows, problems)


def _all_attempts(run: Path, rows: list[tuple[Any, ...]], problems: list[str]) -> tuple[Attempt, ...]:
    attempts = _parsed(_attempt, rows, "attempts", problems)
    if sorted(attempts) != list(range(len(attempts))):
        raise lost_attempts(run)
    return tuple(attempts[id] for id in sorted(attempts))


def lost_attempts(run: Path) -> CorruptError:
    """The error for a missing attempt: without its row, abandoned rows cannot be recognised."""
    if not (run / CATALOG_FILE).exists():
        return CorruptError(
            f"{run / CATALOG_FILE} is missing; without it, the recorded values cannot be read. "
            "Restore the file from a backup."
        )
    return CorruptError(
        f"{run / CATALOG_FILE} is damaged: an attempt is missing, so abandoned steps cannot be recognised. "
        "Restore the file from a backup."
    )


def read_rows(run: Path, table: str, *, is_live: bool) -> list[tuple[Any, ...]]:
    """Read the rows of a table without checksums (events, findings, system metrics, checkpoints)."""
    if (run / RANK_CATALOG_FILE).exists():
        return read_lines(run).get(table, [])
    if not (run / CATALOG_FILE).exists():
        return []
    with connect(run, is_live=is_live) as connection:
        rows = _rows(connection, table)
        if table in ATTEMPT_TABLES and not _has_attempts(connection, table):
            return [(*row, 0) for row in rows]
        return rows


def read_lines(run: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of a rank's catalog by table: of each id the last one, of tables without ids all. Lines that were cut
    off or damaged are left out."""
    with open_inside(run, RANK_CATALOG_FILE) as file:
        data = file.read(MAX_CATALOG_BYTES + 1)
    if len(data) > MAX_CATALOG_BYTES:
        raise CorruptError(
            f"{run / RANK_CATALOG_FILE} is larger than {MAX_CATALOG_BYTES >> 20} MiB, so it is not read."
        )
    commits: dict[int, list[list[Any]]] = {}
    for line in data.splitlines(keepends=True):
        if b'"crc32"' in line and check_document(line):
            with suppress(ValueError, KeyError, TypeError):
                content = json.loads(line)
                commits[int(content["commit"])] = [
                    list(row) for row in content["rows"]
                ]  # a repeated commit counts once
    tables: dict[str, dict[object, tuple[Any, ...]]] = {}
    for number in sorted(commits):
        for place, (table, *values) in enumerate(commits[number]):
            key = values[0] if table in _CHECKED else (number, place)
            # Events have a number in SQLite, which gives them one.
            tables.setdefault(table, {})[key] = (number, *values) if table == "events" else tuple(values)
    return {table: list(rows.values()) for table, rows in tables.items()}


def _has_attempts(connection: sqlite3.Connection, table: str) -> bool:
    return any(column == "attempt" for _, column, *_ in connection.execute(f'pragma table_info("{table}")'))


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """The catalog's entry of a snapshot."""

    place: SnapshotKey
    """Its location."""
    attempt: int
    """The attempt that took it; earlier versions stored the snapshots of all attempts in one place."""
    details: Mapping[str, Any]


def read_snapshot_rows(run: Path, *, is_live: bool) -> list[SnapshotRow]:
    """The entries of all snapshots; damaged rows are left out."""
    if not (run / CATALOG_FILE).exists():
        return []
    problems: list[str] = []
    with connect(run, is_live=is_live) as connection:
        rows = _checked_rows(connection, "snapshots", problems)
    return list(_parsed(_snapshot, rows, "snapshots", problems).values())


@contextmanager
def connect(run: Path, *, is_live: bool) -> Iterator[sqlite3.Connection]:
    """A read-only connection that does not trust the file; SQLite's errors become CorruptError."""
    path = inside(run, CATALOG_FILE)
    sidecars = [inside(run, f"{CATALOG_FILE}{suffix}") for suffix in _SIDECARS]
    for file in (path, *sidecars):
        _refuse_special(file, f"{run.name}: {file.name}")
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(closing(_open_either(path, sidecars, stack, is_live=is_live)))
            yield connection
        except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise CorruptError(f"cannot read {run / CATALOG_FILE}: {error}.") from error


def _refuse_special(path: Path, label: str) -> None:
    """SQLite would wait for a pipe forever. The file is not opened: closing it would drop the writer's locks."""
    try:
        is_regular = stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CorruptError(f"cannot read {label}: {error.strerror}.") from error
    if not is_regular:
        raise CorruptError(f"{label} is not a regular file, so it is not read.")


def _open_either(path: Path, sidecars: list[Path], stack: ExitStack, *, is_live: bool) -> sqlite3.Connection:
    try:
        return _open(path, "mode=ro")
    except sqlite3.OperationalError:
        # While a process writes, no other descriptor may be opened on the file: closing it would drop SQLite's locks.
        if is_live or not any(sidecar.is_file() for sidecar in sidecars):
            raise
    # The writer was killed in a transaction, or the folder is read-only: recovery needs a separate copy.
    copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sonde-")))
    for file in (path, *sidecars):
        if file.is_file():
            shutil.copyfile(file, copies / file.name)
    return _open(copies / path.name, "mode=rw")


def _open(path: Path, query: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path))}?{query}", uri=True, timeout=_TIMEOUT_S)
    try:
        connection.execute("pragma trusted_schema = off")
        connection.execute("pragma cell_size_check = on")
        connection.execute("select count(*) from sqlite_master").fetchone()
        connection.execute("pragma query_only = on")
    except BaseException:
        connection.close()
        raise
    return connection


def _rows(connection: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    """All rows of a real table; a view or virtual table with its name is refused."""
    found = connection.execute("select type, sql from sqlite_master where name = ?", (table,)).fetchone()
    if found is None:
        return []
    if found[0] != "table" or not str(found[1]).lower().startswith("create table"):
        raise CorruptError(f'{CATALOG_FILE}: "{table}" is not a plain table, so it is not read.')
    rows = connection.execute(f'select * from "{table}"').fetchmany(MAX_ROWS + 1)  # noqa: S608 - one of our own names
    if len(rows) > MAX_ROWS:
        raise CorruptError(f'{CATALOG_FILE}: "{table}" has more than {MAX_ROWS:,} rows, so it is not read.')
    return rows


def _checked_rows(connection: sqlite3.Connection, table: str, problems: list[str]) -> list[tuple[Any, ...]]:
    """The rows whose checksum (their last column) is correct; the number of others is reported as a problem."""
    return _good_rows(_rows(connection, table), table, problems)


def _good_rows(rows: list[tuple[Any, ...]], table: str, problems: list[str]) -> list[tuple[Any, ...]]:
    good = [row for row in rows if zlib.crc32(row_text(*row[:-1])) == row[-1]]
    if len(good) < len(rows):
        problems.append(
            f"{CATALOG_FILE}: {len(rows) - len(good)} of {len(rows)} rows of {table} "
            f"{'is' if len(rows) - len(good) == 1 else 'are'} damaged and ignored"
        )
    return good


def _parsed(
    parse: Callable[[tuple[Any, ...]], Parsed], rows: list[tuple[Any, ...]], table: str, problems: list[str]
) -> dict[int, Parsed]:
    """Rows by id; an invalid row is reported as a problem, not raised."""
    parsed: dict[int, Parsed] = {}
    for row in rows:
        try:
            parsed[int(row[0])] = parse(row)
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            problems.append(f"{CATALOG_FILE}: ignoring an invalid row of {table} ({error})")
    return parsed


def _site(row: tuple[Any, ...]) -> Site:
    _, kind, name, shape, dtype, owner, module_type, aliases, _ = row
    return Site(
        kind=str(kind),
        name=str(name),
        shape=tuple(int(size) for size in json.loads(shape or "[]")),
        dtype=str(dtype),
        owner=str(owner),
        module_type=str(module_type),
        aliases=tuple(str(alias) for alias in json.loads(aliases or "[]")),
    )


def _shard(row: tuple[Any, ...]) -> Shard:
    _, part, parts, how, _ = row
    return Shard(part=int(part), parts=int(parts), how=str(how))


def _segment(run: Path, row: tuple[Any, ...]) -> Segment:
    _, stream, rank, level, file, num_rows, first_sequence, last_sequence, first_step, last_step, sha256, tiles, _ = row
    if stream not in STREAMS:
        raise ValueError(f"unknown stream {stream!r}")
    return Segment(
        stream=stream,
        rank=int(rank),
        level=int(level),
        parts=_parts(run, stream, int(rank), int(level), str(file)),
        num_rows=int(num_rows),
        first_sequence=int(first_sequence),
        last_sequence=int(last_sequence),
        first_step=int(first_step),
        last_step=int(last_step),
        sha256=str(sha256),
        tiles=tuple(Tile(*(int(bound) for bound in bounds)) for bounds in json.loads(tiles or "[]")),
    )


def _snapshot(row: tuple[Any, ...]) -> SnapshotRow:
    id, step, _, _, text, _ = row
    details = json.loads(text)
    place = SnapshotKey(snapshot_row_attempt(int(id)), int(step))
    return SnapshotRow(place, int(details.get("attempt", place.attempt)), details)


def _attempt(row: tuple[Any, ...]) -> Attempt:
    number, rank, first_step, time, reason, stats_sequence, scalars_sequence, complete, visible, _ = row
    if reason not in REASONS:
        raise ValueError(f"unknown reason {reason!r}")
    return Attempt(
        number=int(number),
        rank=int(rank),
        first_step=int(first_step),
        time=float(time),
        reason=reason,
        stats_sequence=int(stats_sequence),
        scalars_sequence=int(scalars_sequence),
        mark=Mark(int(complete), int(visible)),
    )


def _parts(run: Path, stream: Stream, rank: int, level: int, file: str) -> tuple[str, ...]:
    """A segment's path inside the run; a bare `file` is in the folder of its stream and level."""
    if "/" in file:
        return tuple(file.split("/"))
    folder = stream_folder(run, stream, rank) if level == 0 else pyramid_folder(run, level, rank)
    return (*folder.relative_to(run).parts, file)
