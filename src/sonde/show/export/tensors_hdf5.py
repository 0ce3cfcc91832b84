"""Steps as groups of one HDF5 file: `/step-000000500/<kind>/<site>`, every dataset with its true name and type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sonde.run import LazyTensors
from sonde.schema.exported import DTYPE, FORMAT, NAME, STEP, require_h5py
from sonde.schema.names import site_name
from sonde.schema.records import to_json
from sonde.schema.tensors import group_name, storage_dtype


def write_step(path: Path, step: int, tensors: LazyTensors, facts: dict[str, Any]) -> None:
    with require_h5py().File(path, "w") as file:
        file.attrs[FORMAT] = 1
        for key, value in facts.items():
            file.attrs[key] = value if isinstance(value, str | int) else to_json(value)
        group = file.create_group(group_name(step), track_order=True)
        group.attrs[STEP] = step
        for name, spec in tensors.specs.items():
            values = tensors[name]
            dtype = storage_dtype(spec.dtype)
            dataset = group.create_dataset(_place(name), data=values.view(dtype) if values.dtype != dtype else values)
            dataset.attrs[NAME], dataset.attrs[DTYPE] = name, spec.dtype


def join(path: Path, parts: Sequence[Path]) -> None:
    """All steps in one file; the description is that of the last part, which is the newest."""
    h5py = require_h5py()
    with h5py.File(path, "w") as whole:
        for part in parts:
            with h5py.File(part, "r") as one:
                for key, value in one.attrs.items():
                    whole.attrs[key] = value
                for group in one:
                    one.copy(group, whole)


def _place(name: str) -> str:
    """HDF5 splits on "/", and knows "." only as the group itself: what it cannot hold of a name is encoded."""
    kind, _, site = name.partition("/")
    parts = [site_name(part) for part in ((kind, site) if site else (kind,))]
    return "/".join("%2E" * len(part) if part in (".", "..") else part for part in parts)
