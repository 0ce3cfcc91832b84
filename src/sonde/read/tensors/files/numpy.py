""".npz files as lazy tensors. Dtypes that numpy lacks are stored as bits, with their names under one extra key."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sonde.errors import CorruptError
from sonde.read.tensors.lazy import LazyTensors, TensorSpec
from sonde.schema.snapshots.exported import DTYPES_KEY, STEP_KEY
from sonde.schema.snapshots.tensors import STORAGE, AnyArray, as_values


def open_npz(path: Path) -> LazyTensors:
    """The arrays of one file; pickled objects are refused by numpy itself."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            dtypes = json.loads(arrays[DTYPES_KEY].tobytes()) if DTYPES_KEY in arrays.files else {}
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist() if info.filename.endswith(".npy")]
            stored = {name.removesuffix(".npy"): _spec(archive, name) for name in names}
    except (ValueError, OSError, zipfile.BadZipFile, KeyError) as error:
        raise CorruptError(f"cannot read {path} as .npz: {error}.") from error
    stored = {name: spec for name, spec in stored.items() if name not in (DTYPES_KEY, STEP_KEY)}
    specs = {
        name: TensorSpec(shape, dtypes.get(name, dtype))
        for name, (shape, dtype) in stored.items()
        if dtypes.get(name, dtype) in STORAGE
    }

    def read(name: str) -> AnyArray:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            values: AnyArray = arrays[name]
        return as_values(values, dtypes[name]) if name in dtypes else values

    return LazyTensors(str(path), specs, read)


def _spec(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], str]:
    with archive.open(name) as file:
        version: Any = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    return shape, dtype.name
