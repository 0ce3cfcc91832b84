"""The pyramid: sketches merged over 4^k steps per row, so that a whole run fits on a screen. Built while sealing.

Level 1 has one file per sealed segment; level k merges four files of level k - 1. A row's `step` is the first of its
4^k steps. If two files meet in the middle of these, each has a part of the row, and a reader merges them, so a file is
built only from the files below it. Files missing after a crash are found with the catalog and built then.

A file holds one attempt. If an attempt ended with fewer than four files of a level, these are merged into one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.layout import PYRAMID_FACTOR
from sonde.schema.sketch import Array, merge_groups
from sonde.schema.thinning import group_starts
from sonde.write.stats.catalog import Committer, Segment, segment_row
from sonde.write.stats.seal import SegmentKey, seal_table
from sonde.write.stats.table import StatsTable, join_stats

_GROUPS_AT_ONCE: Final = 4096


class Pyramid:
    """Grows with each sealed segment. `segments` is the writer's own list of everything in the catalog."""

    def __init__(
        self, run: Path, rank: int, segments: list[Segment], attempt_of: Callable[[int], int] = lambda _: 0
    ) -> None:
        self.run, self.rank, self.segments = run, rank, segments
        self._attempt_of = attempt_of
        """The attempt that a frame of sketches belongs to, by its sequence."""

    def grow(self, catalog: Committer, newest: Segment, table: StatsTable) -> None:
        """Build every file that is due. `table` is the content of `newest`, which saves reading it back."""
        level = 1
        while below := self._uncovered(level):
            for group in self._groups(below, 1 if level == 1 else PYRAMID_FACTOR):
                # Each separately first: four whole tables at once would be the writer's largest allocation.
                parts = [
                    merge_steps([table if segment.id == newest.id else self._read(segment)], PYRAMID_FACTOR**level)
                    for segment in group
                ]
                merged = merge_steps(parts, PYRAMID_FACTOR**level) if len(parts) > 1 else parts[0]
                self._make(catalog, level, group, merged)
            level += 1

    def _groups(self, below: Sequence[Segment], size: int) -> list[Sequence[Segment]]:
        """Files to merge. A file must not be merged before earlier ones: readers go by the sequence."""
        groups: list[Sequence[Segment]] = []
        for _, same in groupby(below, key=self._attempt):
            files = list(same)
            groups += [files[start : start + size] for start in range(0, len(files), size)]
        while groups and len(groups[-1]) < size:
            groups.pop()
        return groups

    def _attempt(self, segment: Segment) -> int:
        return self._attempt_of(segment.last_sequence)

    def _uncovered(self, level: int) -> list[Segment]:
        """The files below a level that are not merged into it yet, in order of sequence."""
        covered = max((segment.last_sequence for segment in self._level(level)), default=-1)
        return [segment for segment in self._level(level - 1) if segment.first_sequence > covered]

    def _level(self, level: int) -> list[Segment]:
        found = [s for s in self.segments if (s.stream, s.rank, s.level) == ("stats", self.rank, level)]
        return sorted(found, key=lambda segment: segment.first_sequence)

    def _make(self, catalog: Committer, level: int, group: Sequence[Segment], table: StatsTable) -> None:
        place = SegmentKey(
            id=max(segment.id for segment in self.segments) + 1,
            stream="stats",
            rank=self.rank,
            level=level,
            number=len(self._level(level)),
            first_sequence=group[0].first_sequence,
            last_sequence=group[-1].last_sequence,
            attempt=self._attempt(group[-1]),
        )
        made = seal_table(self.run, place, table)
        catalog.commit([segment_row(made)])
        self.segments.append(made)

    def _read(self, segment: Segment) -> StatsTable:
        from sonde.write.stats.parquet import read_stats

        return read_stats(self.run / segment.file)


def merge_steps(tables: Sequence[StatsTable], num_steps: int) -> StatsTable:
    """One row per site and `num_steps` steps."""
    table = join_stats(tables)
    bucket = table.step // num_steps
    starts = group_starts(table.site, bucket)
    hist_row, hist = _merge_hists(table, starts)
    return StatsTable(
        table.site[starts],
        bucket[starts] * num_steps,
        table.time[starts],
        _merge_rows(table, starts),
        hist_row,
        hist,
    )


def _merge_rows(table: StatsTable, starts: NDArray[np.intp]) -> Array:
    """A few thousand groups at a time, which stay in the processor's cache."""
    edges = [*starts[::_GROUPS_AT_ONCE], len(table)]
    parts = [
        merge_groups(table.rows[start:end], starts[i * _GROUPS_AT_ONCE : (i + 1) * _GROUPS_AT_ONCE] - start)
        for i, (start, end) in enumerate(pairwise(edges))
    ]
    return np.concatenate(parts)


def _merge_hists(table: StatsTable, starts: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if not len(table.hist_row):
        return table.hist_row, table.hist
    group = np.searchsorted(starts, table.hist_row, side="right") - 1
    first = group_starts(group)
    merged = np.add.reduceat(table.hist, first, axis=0, dtype=np.float64)
    return group[first].astype(np.int64), merged.astype(np.float32)
