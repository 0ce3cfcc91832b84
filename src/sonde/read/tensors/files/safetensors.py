"""safetensors files as lazy tensors, bit-exact in every dtype. The package's numpy reader lacks 8-bit floats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.errors import CorruptError
from sonde.read.tensors.lazy import LazyTensors, TensorSpec
from sonde.schema.snapshots.exported import SAFETENSORS_DTYPES
from sonde.schema.snapshots.tensors import AnyArray, as_values, storage_dtype

MAX_HEADER: Final = 100 << 20
"""Maximum header size in the format."""


def open_safetensors(path: Path) -> LazyTensors:
    """The tensors of one file, memory-mapped: only what is used is read from disk."""
    header, start = _header(path)
    places = {name: _place(path, name, entry) for name, entry in header.items() if name != "__metadata__"}
    size = path.stat().st_size - start
    for name, (spec, first) in places.items():
        if first < 0 or first + spec.nbytes > size:
            raise CorruptError(f'{path}: the tensor "{name}" ends beyond the file, which is truncated.')

    def read(name: str) -> AnyArray:
        spec, first = places[name]
        if not math.prod(spec.shape):
            return as_values(np.empty(spec.shape, storage_dtype(spec.dtype)), spec.dtype)
        bits = np.memmap(path, storage_dtype(spec.dtype), "r", start + first, spec.shape)
        return as_values(np.asarray(bits), spec.dtype)

    return LazyTensors(str(path), {name: spec for name, (spec, _) in places.items()}, read)


def metadata(path: Path) -> dict[str, str]:
    """Read the header of a file."""
    said = _header(path)[0].get("__metadata__", {})
    return {str(key): str(value) for key, value in said.items()} if isinstance(said, dict) else {}


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER:
            raise CorruptError(f"{path} is not a safetensors file: its header claims {length:,} bytes.")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged or not a safetensors file: {error}.") from error
    if not isinstance(header, dict):
        raise CorruptError(f"{path} is not a safetensors file: its header is not a JSON object.")
    return header, 8 + length


def _place(path: Path, name: str, entry: Any) -> tuple[TensorSpec, int]:
    try:
        spec = TensorSpec(tuple(int(length) for length in entry["shape"]), SAFETENSORS_DTYPES[entry["dtype"]])
        first, last = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f'{path}: invalid entry of the tensor "{name}" ({error!r}).') from error
    if last - first != spec.nbytes or min(spec.shape, default=0) < 0:
        raise CorruptError(
            f'{path}: the tensor "{name}" has {last - first:,} bytes, but its shape needs {spec.nbytes:,}.'
        )
    return spec, first
