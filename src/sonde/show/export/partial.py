"""Pieces of a large table, stored as they are computed, so that an interrupted export can resume."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from sonde.show.export.parts import Parts
from sonde.show.export.source import Source


def kept(source: Source, parts: Parts) -> Source:
    """The same source, storing each piece as it is read. A table with one piece is not stored."""
    if source.num_pieces == 1:
        return source

    def read(number: int) -> pa.Table:
        name = f"{source.name}-{number:06d}.arrow"
        if parts.has(name):
            with pa.OSFile(str(parts.path(name)), "rb") as file:
                return pa.ipc.open_file(file).read_all()
        piece = source.read(number)
        with parts.writing(name) as draft:
            _write(draft, piece)
        return piece

    return Source(source.name, source.num_pieces, read)


def _write(path: Path, piece: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, piece.schema, options=options) as writer:
        writer.write_table(piece)
