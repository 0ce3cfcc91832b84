"""Writers of the tensors of one step in each format, and joiners of many steps for the formats that allow it.

Parquet and Arrow have one tensor per row: step, name, dtype, shape, values. Values are float32 if that represents all
of them exactly (bfloat16, float16, 8-bit floats, small integers), otherwise float64; `dtype` is the original dtype. A
value that float64 cannot represent is refused, not rounded.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sonde.errors import UsageError
from sonde.run import LazyTensors
from sonde.schema.names import site_name
from sonde.schema.records import to_json
from sonde.schema.snapshots.exported import (
    DTYPE,
    DTYPES_KEY,
    FORMAT,
    NAME,
    SAFETENSORS_DTYPES,
    STEP,
    STEP_KEY,
    require_h5py,
)
from sonde.schema.snapshots.tensors import AnyArray, group_name, storage_dtype

Facts = dict[str, Any]
_SAFETENSORS_CODES: Final = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
_AS_FLOAT32: Final = frozenset(
    {"float32", "float16", "bfloat16", "int16", "int8", "uint16", "uint8", "bool"}
    | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
_HEAD: Final = (("step", pa.int64()), ("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())))


def _write_safetensors(path: Path, step: int, tensors: LazyTensors, facts: Facts) -> None:
    """Write tensor by tensor: the package's own writer needs them all in memory."""
    header: dict[str, Any] = {
        "__metadata__": {"format": "sonde", "step": str(step), "run": str(facts["id"]), "name": str(facts["name"])}
    }
    offset = 0
    for name, spec in tensors.specs.items():
        if spec.dtype not in _SAFETENSORS_CODES:
            raise UsageError(f"{name} is {spec.dtype}, which safetensors cannot store. Set format= to h5 or npz.")
        span = [offset, offset + spec.nbytes]
        header[name] = {"dtype": _SAFETENSORS_CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers memory-map the data, which must be aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)


def _write_npz(path: Path, step: int, tensors: LazyTensors, facts: Facts) -> None:
    """Write npz: numpy has no bfloat16 or 8-bit floats, so these are stored as bits with their dtypes."""
    as_bits = {name: spec.dtype for name, spec in tensors.specs.items() if storage_dtype(spec.dtype).name != spec.dtype}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _write_array(archive, STEP_KEY, np.array(step))
        _write_array(archive, DTYPES_KEY, np.frombuffer(to_json(as_bits).encode(), np.uint8))
        for name in tensors:
            values = tensors[name]
            _write_array(archive, name, values.view(storage_dtype(as_bits[name])) if name in as_bits else values)


def _write_array(archive: zipfile.ZipFile, name: str, values: AnyArray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asarray(values, order="C"), allow_pickle=False)


def _write_hdf5(path: Path, step: int, tensors: LazyTensors, facts: Facts) -> None:
    """Write steps as groups: `/step-000000500/<kind>/<site>`, every dataset with its original name and dtype."""
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


def _join_hdf5(path: Path, parts: Sequence[Path]) -> None:
    """Join all steps into one file; the description is that of the last, newest part."""
    h5py = require_h5py()
    with h5py.File(path, "w") as whole:
        for part in parts:
            with h5py.File(part, "r") as one:
                for key, value in one.attrs.items():
                    whole.attrs[key] = value
                for group in one:
                    one.copy(group, whole)


def _place(name: str) -> str:
    """Encode what HDF5 cannot represent in a name: it splits on "/" and treats "." as the group itself."""
    kind, _, site = name.partition("/")
    parts = [site_name(part) for part in ((kind, site) if site else (kind,))]
    return "/".join("%2E" * len(part) if part in (".", "..") else part for part in parts)


def _schema(tensors: LazyTensors, facts: Facts) -> pa.Schema:
    narrow = all(spec.dtype in _AS_FLOAT32 for spec in tensors.specs.values())
    values = pa.large_list(pa.float32() if narrow else pa.float64())
    return pa.schema([*_HEAD, ("values", values)], metadata={"sonde": to_json(facts)})


def _rows(step: int, tensors: LazyTensors, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    value = schema.field("values").type.value_type
    for name, spec in tensors.specs.items():
        flat = _exactly(name, tensors[name], np.dtype(value.to_pandas_dtype())).reshape(-1)
        values = pa.LargeListArray.from_arrays(pa.array([0, flat.size], pa.int64()), pa.array(flat, value))
        head = ([step], [name], [spec.dtype], [list(spec.shape)])
        columns = [pa.array(column, kind) for column, (_, kind) in zip(head, _HEAD, strict=True)]
        yield pa.RecordBatch.from_arrays([*columns, values], schema=schema)


def _exactly(name: str, values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if values.dtype.kind == "c":
        raise UsageError(f"{name} is complex, which a table of values cannot store. Set format= to h5 or npz.")
    converted = values.astype(dtype)
    is_long = values.dtype.itemsize == 8 and values.dtype.kind in "iu"
    if is_long and not np.array_equal(converted.astype(values.dtype), values):
        raise UsageError(f"{name} has integers that float64 cannot represent. Set format= to safetensors, h5 or npz.")
    return converted


def _write_parquet(path: Path, step: int, tensors: LazyTensors, facts: Facts) -> None:
    schema = _schema(tensors, facts)
    with pq.ParquetWriter(str(path), schema, compression="zstd", write_page_checksum=True) as writer:
        for batch in _rows(step, tensors, schema):
            writer.write_batch(batch)


def _write_arrow(path: Path, step: int, tensors: LazyTensors, facts: Facts) -> None:
    schema = _schema(tensors, facts)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in _rows(step, tensors, schema):
            writer.write_batch(batch)


def _join_parquet(path: Path, parts: Sequence[Path]) -> None:
    files = [pq.ParquetFile(part) for part in parts]
    schema = _widest([file.schema_arrow for file in files])
    with pq.ParquetWriter(str(path), schema, compression="zstd", write_page_checksum=True) as writer:
        for file in files:
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group).cast(schema))


def _join_arrow(path: Path, parts: Sequence[Path]) -> None:
    files = [pa.ipc.open_file(pa.memory_map(str(part))) for part in parts]
    schema = _widest([file.schema for file in files])
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, schema) as writer:
        for file in files:
            for group in range(file.num_record_batches):
                writer.write_table(pa.Table.from_batches([file.get_batch(group)]).cast(schema))


def _widest(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The schema for all parts, with float64 values if any part needs them."""
    return max(schemas, key=lambda schema: schema.field("values").type.value_type.bit_width)


WRITERS: Final[Mapping[str, Callable[[Path, int, LazyTensors, Facts], None]]] = {
    "safetensors": _write_safetensors,
    "hdf5": _write_hdf5,
    "npz": _write_npz,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
}
JOINERS: Final = {"hdf5": _join_hdf5, "parquet": _join_parquet, "arrow": _join_arrow}
"""Functions that join the files of many steps, for the formats that allow it."""
