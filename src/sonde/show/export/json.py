"""Tables as one JSON document, written row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sonde.schema.records import to_json
from sonde.show.export.source import Source


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
