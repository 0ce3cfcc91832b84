"""Write one array as Zarr v3 shards: in order, in large writes, never a byte twice. zarr-python reads what this writes.

zarr-python's own way to write takes far longer than the disk for the many small tensors of a snapshot.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.record.codecs import Codec
from sonde.schema.shards import CHECKSUM_BYTES, EMPTY, Layout, checksum
from sonde.schema.tensors import AnyArray

NUM_THREADS: Final = min((os.cpu_count() or 1) // 4, 4)
"""That compress. A quarter of the machine at most: the rest trains."""
_AHEAD: Final = 4
_BATCH_BYTES: Final = 8 << 20
_BATCH_PARTS: Final = 512
"""Below IOV_MAX everywhere."""
_LITTLE: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: Final = {"name": "crc32c"}


def array_document(layout: Layout, codec: Codec) -> bytes:
    """The zarr.json of an array."""
    dtype = np.dtype(layout.dtype)
    plain: dict[str, Any] = {"name": "bytes"} if dtype.itemsize == 1 else _LITTLE
    inner = [plain, *codec.to_json(dtype.itemsize), _CRC32C]
    sharding = {
        "chunk_shape": list(layout.chunk_shape),
        "codecs": inner,
        "index_codecs": [_LITTLE, _CRC32C],
        "index_location": "end",
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(layout.shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(layout.shard_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_value(dtype),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        "storage_transformers": [],
    }
    return json.dumps(document).encode()


def write_shards(folder: Path, layout: Layout, codec: Codec, runs: Iterable[AnyArray]) -> tuple[list[Path], int]:
    """Write the elements that `runs` give one after the other. Returns the files, synced, and their bytes."""
    files, num_bytes = [], 0
    chunks = _chunks(layout, runs)
    for shard in range(layout.num_shards):
        path = folder / layout.shard_key(shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        first = shard * layout.chunks_per_shard
        last = min(first + layout.chunks_per_shard, layout.num_chunks)
        num_bytes += _write_shard(path, layout, codec, (next(chunks) for _ in range(first, last)))
        files.append(path)
    return files, num_bytes


def _write_shard(path: Path, layout: Layout, codec: Codec, chunks: Iterable[AnyArray]) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        out = _Batches(fd)
        slots = []
        for data in _encoded(codec, chunks):
            slots.append((out.position, len(data) + CHECKSUM_BYTES))
            out.add(data)
            out.add(checksum(data).to_bytes(CHECKSUM_BYTES, "little"))
        slots += [(EMPTY, EMPTY)] * (layout.chunks_per_shard - len(slots))
        index = b"".join(struct.pack("<QQ", *slot) for slot in slots)
        out.add(index)
        out.add(checksum(index).to_bytes(CHECKSUM_BYTES, "little"))
        out.flush()
        os.fsync(fd)
    finally:
        os.close(fd)
    return out.position


def _encoded(codec: Codec, chunks: Iterable[AnyArray]) -> Iterator[bytes]:
    """In order. Compressing takes longer than the disk: where there are processors to spare, several do it."""
    if not codec.is_compressed or NUM_THREADS < 2:
        yield from map(codec.encode, chunks)
        return
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="sonde-compress") as pool:
        waiting: deque[Future[bytes]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(codec.encode, chunk))
            if len(waiting) > _AHEAD * NUM_THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Batches:
    """Collects parts and writes them together."""

    def __init__(self, fd: int) -> None:
        self.position = 0
        self._fd = fd
        self._parts: list[bytes] = []
        self._waiting = 0

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self._waiting += len(part)
        self.position += len(part)
        if self._waiting >= _BATCH_BYTES or len(self._parts) >= _BATCH_PARTS:
            self.flush()

    def flush(self) -> None:
        parts: list[bytes | memoryview] = list(self._parts)
        while parts:
            written = os.writev(self._fd, parts)
            # A full disk shows as a short write first and as an error only on the next one.
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts and written:
                parts[0] = memoryview(parts[0])[written:]
        self._parts, self._waiting = [], 0


def _chunks(layout: Layout, runs: Iterable[AnyArray]) -> Iterator[AnyArray]:
    """The elements again, cut into chunks: a view where one run holds the whole chunk, a filled buffer elsewhere."""
    source = _Source(runs)
    for chunk in range(layout.num_chunks):
        start, stop = layout.chunk_span(chunk)
        yield source.take(stop - start, layout.chunk_size, layout.dtype)


class _Source:
    """Runs of elements, taken in pieces of another length."""

    def __init__(self, runs: Iterable[AnyArray]) -> None:
        self._runs = iter(runs)
        self._run: AnyArray = np.empty(0, np.uint8)
        self._used = 0

    def take(self, size: int, padded: int, dtype: str) -> AnyArray:
        if size == padded and self._run.size - self._used >= size:
            self._used += size
            return self._run[self._used - size : self._used]
        out = np.zeros(padded, dtype)
        filled = 0
        while filled < size:
            if self._used == self._run.size:
                self._run, self._used = next(self._runs), 0
                continue
            part = self._run[self._used : self._used + size - filled]
            out[filled : filled + part.size] = part
            filled += part.size
            self._used += part.size
        return out


def _fill_value(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "c":
        return [0.0, 0.0]
    return {"f": 0.0, "b": False}.get(dtype.kind, 0)
