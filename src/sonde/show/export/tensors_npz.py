"""One step as an .npz file. numpy has no bfloat16 and no 8-bit floats: those are bits, their types written down."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sonde.run import LazyTensors
from sonde.schema.exported import DTYPES_KEY, STEP_KEY
from sonde.schema.records import to_json
from sonde.schema.tensors import AnyArray, storage_dtype


def write_step(path: Path, step: int, tensors: LazyTensors, facts: dict[str, Any]) -> None:
    as_bits = {name: spec.dtype for name, spec in tensors.specs.items() if storage_dtype(spec.dtype).name != spec.dtype}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _write(archive, STEP_KEY, np.array(step))
        _write(archive, DTYPES_KEY, np.frombuffer(to_json(as_bits).encode(), np.uint8))
        for name in tensors:
            values = tensors[name]
            _write(archive, name, values.view(storage_dtype(as_bits[name])) if name in as_bits else values)


def _write(archive: zipfile.ZipFile, name: str, values: AnyArray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asarray(values, order="C"), allow_pickle=False)
