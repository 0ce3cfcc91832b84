"""An export in parts: each is written atomically, so that an interrupted export can resume.

The parts are stored in a hidden folder next to the output until all are complete; only then does the output appear.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from sonde.errors import UsageError
from sonde.schema.records import to_json
from sonde.show.export.atomic import replacing
from sonde.show.export.source import Source

REQUEST: Final = "request.json"


class Parts:
    """The folder with the parts of one export. Parts of another request, or of a run with new data, are not used."""

    def __init__(self, output: Path, request: Mapping[str, Any]) -> None:
        self.folder = output.with_name(f".{output.name}.parts")
        self._text = to_json(dict(request))
        self._file = -1

    @property
    def num_found(self) -> int:
        """Number of parts that already exist."""
        return sum(not path.name.startswith(".") and path.name != REQUEST for path in self.folder.iterdir())

    def path(self, name: str) -> Path:
        return self.folder / name

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a path to write a part to; the part counts once the block succeeds and its bytes are on disk."""
        with replacing(self.path(name)) as draft:
            yield draft

    @contextmanager
    def open(self) -> Iterator[Parts]:
        """Start or resume. If the block succeeds the folder is removed; otherwise it is kept for the next attempt."""
        self.folder.mkdir(exist_ok=True)
        self._lock()
        try:
            self._forget_others()
            yield self
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            os.close(self._file)

    def _lock(self) -> None:
        """Lock the folder: two exports to the same place would mix their parts."""
        self._file = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise UsageError(
                f"another export to this place is running ({self.folder}). Wait until it has finished, "
                "or choose another place with output=."
            ) from None

    def _forget_others(self) -> None:
        request = self.path(REQUEST)
        is_ours = request.exists() and request.read_text(encoding="utf-8") == self._text
        for path in self.folder.iterdir():
            if not is_ours or path.name.startswith("."):  # left over from an export that was killed
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not is_ours:
            with self.writing(REQUEST) as draft:
                draft.write_text(self._text, encoding="utf-8")


def fingerprint(value: Any) -> str:
    """A short hash of something long, such as a list of thousands of tensors."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()[:16]


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
