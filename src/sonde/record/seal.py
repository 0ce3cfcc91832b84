"""From frames to a sealed segment on disk. The caller commits it to the catalog and only then cuts the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sonde.record.catalog import Segment
from sonde.record.durable import write_durably
from sonde.record.table import ScalarsTable, StatsTable, sort_scalars, sort_stats
from sonde.schema.layout import Stream, pyramid_folder, segment_name, stream_folder
from sonde.schema.records import Frame, ScalarsRecord, StatsRecord

if TYPE_CHECKING:
    from sonde.record.parquet import Encoded


@dataclass(frozen=True, slots=True)
class Place:
    """Which segment: where in the run, and which frames it stands for."""

    id: int
    stream: Stream
    rank: int
    level: int
    number: int
    first_sequence: int
    last_sequence: int

    def folder(self, run: Path) -> Path:
        return pyramid_folder(run, self.level, self.rank) if self.level else stream_folder(run, self.stream, self.rank)


def seal_frames(run: Path, place: Place, frames: Sequence[Frame]) -> tuple[Segment, StatsTable | None]:
    """Write the segment; a file of that name without a catalog row is a leftover and is replaced."""
    if place.stream == "scalars":
        return write_scalars(run, place, sort_scalars([cast(ScalarsRecord, frame.record) for frame in frames])), None
    table = sort_stats([cast(StatsRecord, frame.record) for frame in frames])
    return write_stats(run, place, table), table


def write_stats(run: Path, place: Place, table: StatsTable) -> Segment:
    from sonde.record.parquet import encode_stats  # pyarrow, imported in the writer thread and not with the session

    return _write(run, place, table, encode_stats(table, _facts(place)))


def write_scalars(run: Path, place: Place, table: ScalarsTable) -> Segment:
    from sonde.record.parquet import encode_scalars

    return _write(run, place, table, encode_scalars(table, _facts(place)))


def _facts(place: Place) -> dict[str, int | str]:
    return {name: getattr(place, name) for name in Place.__dataclass_fields__}


def _write(run: Path, place: Place, table: StatsTable | ScalarsTable, encoded: Encoded) -> Segment:
    folder = place.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / segment_name(place.number)
    write_durably(path, memoryview(encoded.content))
    return Segment(
        id=place.id,
        stream=place.stream,
        rank=place.rank,
        level=place.level,
        file=path.relative_to(run).as_posix(),
        num_rows=len(table),
        first_sequence=place.first_sequence,
        last_sequence=place.last_sequence,
        first_step=int(table.step.min()),
        last_step=int(table.step.max()),
        sha256=encoded.sha256,
        tiles=encoded.tiles,
    )
