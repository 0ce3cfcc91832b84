"""One table as Parquet, with page checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sonde.schema.records import to_json
from sonde.show.export.source import Source


def write_parquet(path: Path, source: Source, facts: dict[str, Any]) -> None:
    """Row groups as they come; the run's description is in the file's metadata under `sonde`."""
    pieces = source.pieces()
    first = next(pieces)
    schema = first.schema.with_metadata({"sonde": to_json(facts)})
    with pq.ParquetWriter(str(path), schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(first.cast(schema))
        for piece in pieces:
            writer.write_table(piece.cast(schema))
