"""Write the file of a snapshot: a Zarr group with an array for each tensor, in a ZIP archive, and sync it.

One file, because a file costs an fsync: a thousand small tensors must not cost a thousand of them.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sonde.schema.arrays import checksum_of, cut
from sonde.schema.lake import SnapshotDocument, TensorEntry
from sonde.schema.tensors import GROUP_FILE, HostTensor, Receipt, Snapshot, array_paths, kind_of
from sonde.write.durable import open_file
from sonde.write.tensors.arrays import CHUNK_BYTES, Piece, array_pieces, made
from sonde.write.tensors.codecs import bit_round, check_mantissa_bits, codec_for, rounds

_GROUP: Final = b'{"zarr_format":3,"node_type":"group","attributes":{}}'
_BUFFER: Final = 1 << 20
_SYNC_BYTES: Final = 64 << 20
"""A slow disk is seen to make progress, and the last sync is not the whole file's."""


class ArchiveWriter:
    """Writes snapshots, all in one way."""

    def __init__(self, *, rank: int = 0, compression: str = "auto", keep_mantissa_bits: int | None = None) -> None:
        codec_for("param", compression)
        check_mantissa_bits(keep_mantissa_bits)
        self._rank, self._compression, self._keep_bits = rank, compression, keep_mantissa_bits
        self.written_bytes = 0
        """Grows while a snapshot is written: a slow disk is told from one that has stopped."""

    def write(self, path: Path, snapshot: Snapshot) -> Receipt:
        """A new file, synced; its folder is not. Nothing is removed where this fails."""
        entries: dict[str, TensorEntry] = {}
        file = _File(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        buffer = io.BufferedWriter(file, _BUFFER)
        try:
            with zipfile.ZipFile(buffer, "w") as archive:
                for kind in dict.fromkeys(map(kind_of, snapshot.tensors)):
                    archive.writestr(f"{kind}/{GROUP_FILE}", _GROUP)
                for key, data in made(self._pieces(snapshot.tensors, entries)):
                    archive.writestr(key, data)
                    self.written_bytes += len(data)
                document = self._document(snapshot, entries)
                archive.writestr(GROUP_FILE, document)
            buffer.flush()
            stored_bytes = file.sync()
        finally:
            buffer.close()
        return Receipt(
            step=snapshot.step,
            nbytes=snapshot.nbytes,
            stored_bytes=stored_bytes,
            num_tensors=len(entries),
            sha256=hashlib.sha256(document).hexdigest(),
        )

    def _document(self, snapshot: Snapshot, entries: Mapping[str, TensorEntry]) -> bytes:
        return SnapshotDocument(
            step=snapshot.step,
            time=snapshot.time,
            reason=snapshot.reason,
            rank=self._rank,
            attempt=snapshot.attempt,
            tensors=entries,
            details={"compression": self._compression},
        ).to_bytes()

    def _pieces(self, tensors: Mapping[str, HostTensor], entries: dict[str, TensorEntry]) -> Iterator[Piece]:
        """The files of each tensor's array; its entry is made on the way."""
        paths = array_paths(tensors)
        for name, tensor in tensors.items():
            bits = tensor.flat()
            is_rounded = rounds(tensor.dtype, self._keep_bits)
            if is_rounded and self._keep_bits is not None:
                bits = bit_round(bits, tensor.dtype, self._keep_bits)
            codec = codec_for(kind_of(name), self._compression)
            layout = cut(tensor.shape, bits.dtype.name, chunk_bytes=CHUNK_BYTES, is_compressed=codec.is_compressed)
            entries[name] = TensorEntry(
                array=paths[name],
                layout=layout,
                shape=tensor.shape,
                dtype=tensor.dtype,
                crc32c=checksum_of(bits),
                keep_mantissa_bits=self._keep_bits if is_rounded else None,
            )
            yield from array_pieces(paths[name], layout, tensor.dtype, codec, bits)


class _File(io.RawIOBase):
    """System calls go through `os`, where a test can break them."""

    def __init__(self, fd: int) -> None:
        self._fd, self._unsynced = fd, 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = os.write(self._fd, data)
        self._unsynced += written
        if self._unsynced >= _SYNC_BYTES:
            self.sync()
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._fd, offset, whence)

    def sync(self) -> int:
        """The number of bytes that are on disk now."""
        os.fsync(self._fd)
        self._unsynced = 0
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)
