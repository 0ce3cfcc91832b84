"""One tensor as a Zarr v3 array, under its own name and with its own values: any Zarr reader has it. Knows no file.

zarr-python's own way to write takes far longer than the disk for the many small tensors of a snapshot.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np

from sonde.schema.arrays import CHECKSUM_BYTES, Layout, checksum
from sonde.schema.tensors import DTYPE_ATTRIBUTE, GROUP_FILE, STORAGE, AnyArray
from sonde.write.tensors.codecs import Codec

CHUNK_BYTES: Final = 4 << 20
NUM_THREADS: Final = min((os.cpu_count() or 1) // 4, 4)
"""That compress. A quarter of the machine at most: the rest trains."""
_AHEAD: Final = 2

Piece = tuple[str, Callable[[], bytes]]
"""A file of an array, and what makes its content."""


def array_pieces(path: str, layout: Layout, dtype: str, codec: Codec, bits: AnyArray) -> Iterator[Piece]:
    """The files of an array whose elements are `bits`, flat."""
    yield f"{path}/{GROUP_FILE}", partial(array_document, path, layout, dtype, codec)
    for chunk in range(layout.num_chunks):
        yield f"{path}/{layout.chunk_key(chunk)}", partial(_chunk, layout, codec, bits, chunk)


def made(pieces: Iterable[Piece]) -> Iterator[tuple[str, bytes]]:
    """In order. Compressing takes longer than the disk: where there are processors to spare, several do it."""
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
    """The zarr.json of an array."""
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
        # Of its own: tensors of one kind are variables of one dataset to xarray, which shares dimensions by name.
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
    """What a reader shows where a chunk is missing: not a number, where the type has that."""
    if STORAGE[dtype] != dtype:
        width = np.dtype(STORAGE[dtype]).itemsize
        return 0x80 if dtype.endswith("fnuz") else (1 << 8 * width) - 1
    return {"f": "NaN", "c": ["NaN", "NaN"], "b": False}.get(np.dtype(dtype).kind, 0)
