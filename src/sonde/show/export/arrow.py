"""One table as an Arrow IPC file (also called Feather)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from sonde.schema.records import to_json
from sonde.show.export.source import Source


def write_arrow(path: Path, source: Source, facts: dict[str, Any]) -> None:
    """Record batches as they come; the run's description is in the file's metadata under `sonde`."""
    pieces = source.pieces()
    first = next(pieces)
    schema = first.schema.with_metadata({"sonde": to_json(facts)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
        writer.write_table(first.cast(schema))
        for piece in pieces:
            writer.write_table(piece.cast(schema))
