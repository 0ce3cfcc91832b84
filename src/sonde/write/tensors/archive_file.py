"""Writes the file of a snapshot: a Zarr group with an array for each tensor, in a ZIP archive, and syncs it.

One file, because a file costs an fsync: a thousand small tensors must not cost a thousand of them. Any Zarr reader
reads its arrays. They are not written by zarr-python, which takes ten times the processor time for small tensors: 1.7
to 2.2 s for 1,000 tensors of 4 KiB, zstd and crc32c, in a `ZipStore`; 0.2 s here.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.errors import UsageError
from sonde.schema.snapshots.arrays import CHECKSUM_BYTES, Layout, checksum, checksum_of, cut
from sonde.schema.snapshots.document import SnapshotDocument, TensorEntry
from sonde.schema.snapshots.tensors import (
    DTYPE_ATTRIBUTE,
    GROUP_FILE,
    STORAGE,
    AnyArray,
    HostTensor,
    Receipt,
    Snapshot,
    array_paths,
    kind_of,
)
from sonde.write.durable import open_file
from sonde.write.tensors.codecs import (
    Codec,
    Compression,
    bit_round,
    check_compression,
    check_mantissa_bits,
    codec_for,
    rounds,
)

_GROUP: Final = b'{"zarr_format":3,"node_type":"group","attributes":{}}'
_BUFFER: Final = 1 << 20
_SYNC_BYTES: Final = 64 << 20
"""Bytes between syncs: shows progress on a slow disk, and keeps the last sync short."""
CHUNK_MIB: Final = 4.0
MAX_CHUNK_MIB: Final = 1024
"""A chunk is compressed as a whole, in memory; blosc takes less than 2 GiB."""
NUM_THREADS: Final = min((os.cpu_count() or 1) // 4, 4)
"""Compression threads. At most a quarter of the machine: the rest trains."""
_AHEAD: Final = 2

Piece = tuple[str, Callable[[], bytes]]
"""A file of an array, and the function that creates its content."""


class ArchiveWriter:
    """Writes snapshots, all with the same options."""

    def __init__(
        self,
        *,
        rank: int = 0,
        compression: Compression = "auto",
        chunk_mib: float = CHUNK_MIB,
        keep_mantissa_bits: int | None = None,
    ) -> None:
        check_compression(compression)
        check_mantissa_bits(keep_mantissa_bits)
        if not 0 < chunk_mib <= MAX_CHUNK_MIB:
            raise UsageError(f"chunk_mib must be above 0 and at most {MAX_CHUNK_MIB}; got {chunk_mib!r}.")
        self._chunk_bytes = max(int(chunk_mib * (1 << 20)), 1)
        self._rank, self._compression, self._keep_bits = rank, compression, keep_mantissa_bits
        self.written_bytes = 0
        """Grows while a snapshot is written: distinguishes a slow disk from one that has stopped."""

    def write(self, path: Path, snapshot: Snapshot) -> Receipt:
        """Write a new file and sync it, but not its folder. Nothing is removed if this fails."""
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
            details={"compression": dict(c) if isinstance(c := self._compression, Mapping) else c},
        ).to_bytes()

    def _pieces(self, tensors: Mapping[str, HostTensor], entries: dict[str, TensorEntry]) -> Iterator[Piece]:
        """The files of each tensor's array; also creates its entry."""
        paths = array_paths(tensors)
        for name, tensor in tensors.items():
            bits = tensor.flat()
            is_rounded = rounds(tensor.dtype, self._keep_bits)
            if is_rounded and self._keep_bits is not None:
                bits = bit_round(bits, tensor.dtype, self._keep_bits)
            codec = codec_for(kind_of(name), self._compression)
            layout = cut(
                tensor.shape, bits.dtype.name, chunk_bytes=self._chunk_bytes, is_compressed=codec.is_compressed
            )
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


def array_pieces(path: str, layout: Layout, dtype: str, codec: Codec, bits: AnyArray) -> Iterator[Piece]:
    """The files of an array whose elements are `bits`, flat."""
    yield f"{path}/{GROUP_FILE}", partial(array_document, path, layout, dtype, codec)
    for chunk in range(layout.num_chunks):
        yield f"{path}/{layout.chunk_key(chunk)}", partial(_chunk, layout, codec, bits, chunk)


def made(pieces: Iterable[Piece]) -> Iterator[tuple[str, bytes]]:
    """Compressed chunks in order. Compression is slower than the disk, so spare processors share it."""
    if NUM_THREADS < 2:
        yield from ((key, make()) for key, make in pieces)
        return
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="sonde-compress") as pool:
        waiting: deque[tuple[str, Future[bytes]]] = deque()
        for key, make in pieces:
            waiting.append((key, pool.submit(make)))
            if len(waiting) > _AHEAD * NUM_THREADS:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def array_document(path: str, layout: Layout, dtype: str, codec: Codec) -> bytes:
    storage = np.dtype(layout.dtype)
    plain = {"name": "bytes"} if storage.itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}
    site = path.partition("/")[2]
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": layout.shape,
        "data_type": storage.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout.chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_value(dtype),
        "codecs": [plain, *codec.to_json(storage.itemsize), {"name": "crc32c"}],
        # A separate name: to xarray, tensors of one kind are variables of one dataset, which shares dimensions by name.
        "dimension_names": [f"{site}.d{axis}" for axis in range(len(layout.shape))],
        "attributes": {DTYPE_ATTRIBUTE: dtype},
        "storage_transformers": [],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _chunk(layout: Layout, codec: Codec, bits: AnyArray, chunk: int) -> bytes:
    start, stop = layout.chunk_span(chunk)
    run = bits[start:stop]
    if run.size < layout.chunk_size:  # the last one along its axis
        run = np.concatenate([run, np.zeros(layout.chunk_size - run.size, run.dtype)])
    data = codec.encode(run)
    return data + checksum(data).to_bytes(CHECKSUM_BYTES, "little")


def _fill_value(dtype: str) -> Any:
    """The fill value for a missing chunk: NaN, if the type has it."""
    if STORAGE[dtype] != dtype:
        width = np.dtype(STORAGE[dtype]).itemsize
        return 0x80 if dtype.endswith("fnuz") else (1 << 8 * width) - 1
    return {"f": "NaN", "c": ["NaN", "NaN"], "b": False}.get(np.dtype(dtype).kind, 0)
