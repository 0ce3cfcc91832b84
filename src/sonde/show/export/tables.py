"""Tables as files: JSON, CSV, Parquet (with page checksums) or Arrow IPC (Feather), written piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from sonde.schema.records import to_json
from sonde.show.export.source import Source


def write_table(path: Path, format: str, source: Source, facts: dict[str, Any]) -> None:
    """Write rows in order. In Parquet and Arrow the description of the run is in the metadata, under `sonde`."""
    pieces = source.pieces()
    first = next(pieces)
    schema = first.schema if format == "csv" else first.schema.with_metadata({"sonde": to_json(facts)})
    with _writer(path, format, schema) as writer:
        for piece in chain([first], pieces):
            writer.write_table(piece.cast(schema))


@contextmanager
def _writer(path: Path, format: str, schema: pa.Schema) -> Iterator[Any]:
    if format == "csv":  # non-finite numbers are written as `nan`, `inf` and `-inf`
        with pa_csv.CSVWriter(str(path), schema) as writer:
            yield writer
    elif format == "parquet":
        with pq.ParquetWriter(str(path), schema, compression="zstd", write_page_checksum=True) as writer:
            yield writer
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
            yield writer


def write_json(path: Path, sources: Sequence[Source], facts: dict[str, Any]) -> None:
    """Write `{"run": {…}, "scalars": [{…}, …], …}`; non-finite numbers are the strings "nan", "inf" and "-inf"."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"run": {to_json(facts)}')
        for source in sources:
            file.write(f',\n"{source.name}": [')
            separator = "\n"
            for piece in source.pieces():
                for batch in piece.to_batches(max_chunksize=10_000):
                    for row in batch.to_pylist():
                        file.write(f"{separator}{to_json(row)}")
                        separator = ",\n"
            file.write("]")
        file.write("}\n")
