"""Merged sketches at 4^k steps per row, built while sealing."""

from __future__ import annotations

from pathlib import Path

from sonde.record.catalog import Catalog, Segment
from sonde.record.table import StatsTable


class Pyramid:
    def __init__(self, run: Path, rank: int, segments: list[Segment]) -> None:
        self.run, self.rank, self.segments = run, rank, segments

    def grow(self, catalog: Catalog, segment: Segment, table: StatsTable) -> None:
        return
