"""The file of a snapshot: a Zarr group in an uncompressed ZIP archive, so that each entry is a contiguous range of
bytes. The caller provides a function that reads bytes; nothing is opened here.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from typing import IO, Any, Final

from sonde.errors import CorruptError
from sonde.schema.snapshots.arrays import DamageError
from sonde.schema.snapshots.document import MAX_DOCUMENT_BYTES, SnapshotDocument, SnapshotReader
from sonde.schema.snapshots.tensors import GROUP_FILE

ReadFile = Callable[[int, int], bytes]
"""Reads bytes of the archive: from an offset, at most N."""

_HEADER: Final = struct.Struct("<4s22xHH")
"""The header of an entry: its signature, and the lengths of its name and of the extra field."""
_SIGNATURE: Final = b"PK\x03\x04"


def open_archive(
    file: IO[bytes], read_file: ReadFile, base: Callable[[int], SnapshotReader], where: str
) -> SnapshotReader:
    """The snapshot in a file. Its directory is read from `file` now, its tensors by `read_file` on request."""
    try:
        archive = Archive(file)
        document = archive.read(GROUP_FILE, 0, MAX_DOCUMENT_BYTES + 1, read_file)
    except DamageError as error:
        raise CorruptError(f"{where} is damaged: {error}. Its tensors are not shown.") from error
    return SnapshotReader(
        SnapshotDocument.from_bytes(document, where),
        lambda key, offset, size: archive.read(key, offset, size, read_file),
        base,
        where,
    )


class Archive:
    """The directory of an archive, read once."""

    def __init__(self, file: IO[bytes]) -> None:
        bounded: Any = _Bounded(file)
        try:
            with zipfile.ZipFile(bounded) as archive:
                self._entries = {
                    entry.filename: (entry.header_offset, entry.file_size)
                    for entry in archive.infolist()
                    if entry.compress_type == zipfile.ZIP_STORED
                }
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
            raise DamageError(str(error)) from error

    def read(self, key: str, offset: int, size: int, read_file: ReadFile) -> bytes:
        """Bytes of an entry: from an offset (negative: from the end), at most `size`."""
        if key not in self._entries:
            raise DamageError(f"{key} is missing")
        header, length = self._entries[key]
        start = max(length + offset, 0) if offset < 0 else min(offset, length)
        stop = min(start + size, length)
        found = read_file(header, _HEADER.size)
        signature, num_name, num_extra = _HEADER.unpack(found) if len(found) == _HEADER.size else (b"", 0, 0)
        if signature != _SIGNATURE:
            raise DamageError(f"{key} is not where the directory says")
        return read_file(header + _HEADER.size + num_name + num_extra + start, stop - start)


class _Bounded:
    """A file for zipfile, which would otherwise read a directory of any size that the file claims."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if size > MAX_DOCUMENT_BYTES:
            raise DamageError("its directory is too large")
        return self._file.read(MAX_DOCUMENT_BYTES if size < 0 else size)
