"""Sealed Parquet segments: reads only the row groups a query needs and verifies every page's checksum."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.catalog import Segment
from sonde.read.run.folder import inside, open_inside
from sonde.schema.attempts import NO_LIMIT

MAX_SEGMENT_ROWS: Final = 64_000_000
ALWAYS_HASHED_BYTES: Final = 1 << 20
"""Files up to this size are hashed before their first use; in larger ones, pages are verified as they are read."""
COUNTED: Final = "counted"
"""The column of scalars that were logged ahead of the current step."""
_MAX_INFLATION: Final = 4096
_THRIFT_LIMIT: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Steps from `first` to `last`, both included."""

    first: int
    last: int

    def overlaps(self, first: int, last: int) -> bool:
        return first <= self.last and self.first <= last


EVERYTHING: Final = Span(-(1 << 62), 1 << 62)


@dataclass(slots=True)
class SegmentReader:
    """Reads segments of one run and caches their footers. Damage raises a CorruptError that names the file."""

    run: Path
    _footers: dict[str, Any] = field(default_factory=dict)
    _last_steps: dict[tuple[str, int], int] = field(default_factory=dict)

    def read(self, segment: Segment, key: str, ids: NDArray[np.int64], span: Span, columns: list[str]) -> pa.Table:
        """Rows of the given ids (sorted; in column `key`) and steps. Only tiles that may contain them are read."""
        groups = _tiles_of(segment, ids, span)
        if not groups:
            return None
        try:
            table = self._read(segment, groups, columns)
        except FileNotFoundError:
            raise damaged(segment, "it is missing") from None
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
            raise damaged(segment, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        self._check_bounds(segment, groups, table, key)
        if segment.is_whole:
            return table
        return table.filter(pa.array(shown(segment, table))).select(columns)

    def last_step(self, segment: Segment) -> int:
        """The last step with visible rows; -1 if there is none."""
        if segment.is_whole:
            return segment.last_step
        known = self._last_steps.get(key := (segment.name, segment.until))
        if known is None:
            everything = np.array(sorted({tile.first_site for tile in segment.tiles}), np.int64)
            by = "site" if segment.stream == "stats" else "name"
            table = self.read(segment, by, everything, EVERYTHING, ["step", by])
            steps = None if table is None else table["step"].to_numpy()
            known = self._last_steps[key] = int(steps.max()) if steps is not None and len(steps) else -1
        return known

    def _read(self, segment: Segment, groups: list[int], columns: list[str]) -> pa.Table:
        path = inside(self.run, *segment.parts)
        if not path.is_file():
            raise FileNotFoundError(path)
        if segment.name not in self._footers and path.stat().st_size <= ALWAYS_HASHED_BYTES:
            self.verify(segment)
        with pq.ParquetFile(
            path,
            metadata=self._footers.get(segment.name),
            page_checksum_verification=True,
            thrift_string_size_limit=_THRIFT_LIMIT,
            thrift_container_size_limit=_THRIFT_LIMIT,
        ) as file:
            if segment.name not in self._footers:
                _check_footer(segment, file.metadata, path.stat().st_size)
                self._footers[segment.name] = file.metadata
            names = file.schema_arrow.names
            # Identifies hidden rows; scalars of format 1 lack this column.
            extra = [] if segment.is_whole or COUNTED not in names else [COUNTED]
            return file.read_row_groups(groups, columns=[*dict.fromkeys((*columns, *extra))])

    def verify(self, segment: Segment) -> None:
        """Compare the hash of the whole file with the catalog."""
        try:
            with open_inside(self.run, *segment.parts) as file:
                digest = hashlib.sha256()
                while piece := file.read(1 << 20):
                    digest.update(piece)
        except FileNotFoundError:
            raise damaged(segment, "it is missing") from None
        if digest.hexdigest() != segment.sha256:
            raise damaged(segment, "its hash differs from the catalog")

    @staticmethod
    def _check_bounds(segment: Segment, groups: list[int], table: pa.Table, key: str) -> None:
        """Check that the rows are within the bounds in the catalog."""
        tiles = [segment.tiles[group] for group in groups]
        low, high = min(tile.first_site for tile in tiles), max(tile.last_site for tile in tiles)
        for name, first, last in ((key, low, high), ("step", segment.first_step, segment.last_step)):
            column = table[name].to_numpy()
            if len(column) and not (first <= column.min() and column.max() <= last):
                raise damaged(segment, f"its column {name} exceeds the bounds in the catalog")


def shown(segment: Segment, table: pa.Table) -> NDArray[np.bool_]:
    """A mask of the visible rows of a segment."""
    step = table["step"].to_numpy()
    made = step
    if COUNTED in table.column_names:
        made = np.minimum(step, table[COUNTED].fill_null(NO_LIMIT).to_numpy())
    is_shown: NDArray[np.bool_] = (made >= segment.since) & (made < segment.until)
    return is_shown


def damaged(segment: Segment, why: str) -> CorruptError:
    return CorruptError(
        f"{segment.name} is damaged ({why}): steps {segment.first_step} to {segment.last_step} of {segment.stream}. "
        "Restore the file from a backup; the rest of the run can be read."
    )


def _tiles_of(segment: Segment, ids: NDArray[np.int64], span: Span) -> list[int]:
    """The row groups that may contain some of the ids in the span."""
    if not span.overlaps(segment.first_step, segment.last_step) or not len(ids):
        return []
    groups = []
    for number, tile in enumerate(segment.tiles):
        position = int(np.searchsorted(ids, tile.first_site))
        has_site = position < len(ids) and int(ids[position]) <= tile.last_site
        if has_site and span.overlaps(tile.first_step, tile.last_step):
            groups.append(number)
    return groups


def _check_footer(segment: Segment, footer: Any, num_bytes: int) -> None:
    """Check a footer before memory is allocated for rows that it only claims to have."""
    groups = [footer.row_group(number) for number in range(min(footer.num_row_groups, len(segment.tiles) + 1))]
    if footer.num_rows != segment.num_rows or footer.num_rows > MAX_SEGMENT_ROWS:
        raise damaged(segment, f"it has {footer.num_rows} rows, but the catalog says {segment.num_rows}")
    if len(groups) != len(segment.tiles) or sum(group.num_rows for group in groups) != segment.num_rows:
        raise damaged(segment, "its row groups differ from the catalog")
    if any(group.num_rows < 0 or group.total_byte_size > num_bytes * _MAX_INFLATION for group in groups):
        raise damaged(segment, "it claims more data than its size allows")
