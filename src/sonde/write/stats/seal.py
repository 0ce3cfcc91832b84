"""Turns frames into a sealed segment on disk. The caller commits it to the catalog and only then cuts the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from sonde.schema.layout import Stream, pyramid_folder, segment_name, stream_folder
from sonde.schema.records import Frame, ScalarsRecord, StatsRecord
from sonde.write.durable import DurableFile, make_folder
from sonde.write.stats.catalog import Segment
from sonde.write.stats.table import ScalarsTable, StatsTable, sort_scalars, sort_stats


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """A segment: its place in the run, and the frames it replaces."""

    id: int
    stream: Stream
    rank: int
    level: int
    number: int
    first_sequence: int
    last_sequence: int
    attempt: int

    def folder(self, run: Path) -> Path:
        return pyramid_folder(run, self.level, self.rank) if self.level else stream_folder(run, self.stream, self.rank)


def sort_frames(stream: Stream, frames: Sequence[Frame]) -> StatsTable | ScalarsTable:
    """The rows of all frames in the order of a segment."""
    if stream == "scalars":
        return sort_scalars([cast(ScalarsRecord, frame.record) for frame in frames])
    return sort_stats([cast(StatsRecord, frame.record) for frame in frames])


def seal_table(run: Path, place: SegmentKey, table: StatsTable | ScalarsTable) -> Segment:
    """Write one sorted table as one file that is durable when this returns.

    A file of that name without a catalog row is a leftover, and is replaced.
    """
    from sonde.write.stats import parquet  # pyarrow is imported in the writer thread, not with the session

    folder = place.folder(run)
    make_folder(folder)
    facts = {name: getattr(place, name) for name in SegmentKey.__dataclass_fields__}
    with DurableFile(folder / segment_name(place.number)) as file:
        if isinstance(table, StatsTable):
            tiles = parquet.write_stats(file, table, facts)
        else:
            tiles = parquet.write_scalars(file, table, facts)
    return Segment(
        id=place.id,
        stream=place.stream,
        rank=place.rank,
        level=place.level,
        file=file.path.relative_to(run).as_posix(),
        num_rows=len(table),
        first_sequence=place.first_sequence,
        last_sequence=place.last_sequence,
        first_step=int(table.step.min()),
        last_step=int(table.step.max()),
        sha256=file.sha256.hexdigest(),
        tiles=tiles,
    )
