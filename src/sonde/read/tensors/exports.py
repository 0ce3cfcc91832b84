"""Reading of whole tensors that `sonde export` wrote, by step, from any of its formats, with their original dtypes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.errors import UsageError
from sonde.read.tensors.files.hdf5 import open_file, open_hdf5
from sonde.read.tensors.files.numpy import open_npz
from sonde.read.tensors.files.safetensors import metadata, open_safetensors
from sonde.read.tensors.lazy import LazyTensors, TensorSpec
from sonde.schema.snapshots.exported import FORMAT, STEP, STEP_KEY
from sonde.schema.snapshots.tensors import AnyArray, as_values, step_of, storage_dtype

Steps = dict[int, LazyTensors]
_HEAD: Final = ["step", "name", "dtype", "shape"]


def open_export(path: str | os.PathLike[str]) -> Steps:
    """The tensors of an exported file or folder, by step and name, loaded lazily.

    open_export("run-gradients.h5")[500]["grad/layers.0.weight"]
    """
    found = Path(path)
    if found.is_dir():
        parts = sorted(part for part in found.iterdir() if step_of(part.stem) is not None)
        return {step: tensors for part in parts for step, tensors in open_export(part).items()}
    if found.suffix not in _READERS:
        raise UsageError(
            f"{found} is not an export of tensors. Give a {', '.join(_READERS)} file, or a folder of them."
        )
    if found.exists() and not found.is_file():
        raise UsageError(f"{found} is not a regular file, so it is not read.")
    return _READERS[found.suffix](found)


def _hdf5(path: Path) -> Steps:
    whole = open_hdf5(path)
    with open_file(path) as file:
        if FORMAT not in file.attrs:
            raise UsageError(f"{path} is not an export of tensors. Open other HDF5 files with open_tensors.")
        groups = {group: int(file[group].attrs[STEP]) for group in file}
    if len(groups) == 1:
        return dict.fromkeys(groups.values(), whole)
    steps: Steps = {}
    for group, step in groups.items():
        names = {name.removeprefix(f"{group}/"): name for name in whole if name.startswith(f"{group}/")}
        steps[step] = _renamed(whole, names, f"{path}, step {step}")
    return steps


def _renamed(tensors: LazyTensors, names: Mapping[str, str], label: str) -> LazyTensors:
    return LazyTensors(
        label, {short: tensors.specs[name] for short, name in names.items()}, lambda n: tensors[names[n]]
    )


def _safetensors(path: Path) -> Steps:
    step = metadata(path).get("step")
    return {_step(path, step): open_safetensors(path)}


def _npz(path: Path) -> Steps:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        step = str(int(arrays[STEP_KEY])) if STEP_KEY in arrays.files else None
    return {_step(path, step): open_npz(path)}


def _step(path: Path, said: str | None) -> int:
    step = int(said) if said is not None and said.isdigit() else step_of(path.stem)
    if step is None:
        raise UsageError(f"{path} is not an export: it does not contain its step. Open it with open_tensors.")
    return step


def _parquet(path: Path) -> Steps:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, page_checksum_verification=True)
    heads = [file.read_row_group(group, _HEAD) for group in range(file.num_row_groups)]
    return _rows(path, heads, lambda group: file.read_row_group(group, ["values"]))


def _arrow(path: Path) -> Steps:
    import pyarrow as pa

    file = pa.ipc.open_file(pa.memory_map(str(path)))
    batches = [pa.Table.from_batches([file.get_batch(group)]) for group in range(file.num_record_batches)]
    return _rows(path, batches, lambda group: batches[group])


def _rows(path: Path, heads: list[Any], read: Callable[[int], Any]) -> Steps:
    """Tensors stored as rows of a table, read one row group at a time."""
    places: dict[int, dict[str, tuple[int, int]]] = {}
    specs: dict[int, dict[str, TensorSpec]] = {}
    for group, head in enumerate(heads):
        for row, entry in enumerate(head.select(_HEAD).to_pylist()):
            places.setdefault(entry["step"], {})[entry["name"]] = group, row
            specs.setdefault(entry["step"], {})[entry["name"]] = TensorSpec(tuple(entry["shape"]), entry["dtype"])

    def reader(step: int) -> Callable[[str], AnyArray]:
        def tensor(name: str) -> AnyArray:
            group, row = places[step][name]
            spec = specs[step][name]
            values = read(group)["values"].chunk(0)[row].values.to_numpy(zero_copy_only=False)
            dtype = as_values(np.empty(0, storage_dtype(spec.dtype)), spec.dtype).dtype
            return np.asarray(values.astype(dtype)).reshape(spec.shape)

        return tensor

    return {step: LazyTensors(f"{path}, step {step}", specs[step], reader(step)) for step in specs}


_READERS: Final[dict[str, Callable[[Path], Steps]]] = {
    ".h5": _hdf5, ".safetensors": _safetensors, ".npz": _npz, ".parquet": _parquet, ".arrow": _arrow,
}  # fmt: skip
