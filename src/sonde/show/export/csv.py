"""One table as CSV."""

from __future__ import annotations

from pathlib import Path

import pyarrow.csv

from sonde.show.export.source import Source


def write_csv(path: Path, source: Source) -> None:
    """A header and one line per row; numbers that are not finite are `nan`, `inf` and `-inf`."""
    pieces = source.pieces()
    first = next(pieces)
    with pyarrow.csv.CSVWriter(str(path), first.schema) as writer:
        writer.write_table(first)
        for piece in pieces:
            writer.write_table(piece)
