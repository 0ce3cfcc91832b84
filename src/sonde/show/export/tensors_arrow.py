"""Steps as rows of a table, one tensor a row, for what reads Parquet or Arrow: step, name, dtype, shape, values.

Values are float32 where that holds every one of them exactly (bfloat16, float16, 8-bit floats, small integers), else
float64; `dtype` tells what they were. A value that float64 cannot hold is refused, not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sonde.errors import UsageError
from sonde.run import LazyTensors
from sonde.schema.records import to_json

_AS_FLOAT32: Final = frozenset(
    {"float32", "float16", "bfloat16", "int16", "int8", "uint16", "uint8", "bool"}
    | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
_HEAD: Final = (("step", pa.int64()), ("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())))


def _schema(value: Any, facts: dict[str, Any] | None = None) -> pa.Schema:
    described = {"sonde": to_json(facts)} if facts is not None else None
    return pa.schema([*_HEAD, ("values", pa.large_list(value))], metadata=described)


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
        raise UsageError(f"{name} is complex, which a table of values cannot hold. Choose --format h5 or npz.")
    converted = values.astype(dtype)
    if (
        values.dtype.itemsize == 8
        and values.dtype.kind in "iu"
        and not np.array_equal(converted.astype(values.dtype), values)
    ):
        raise UsageError(f"{name} has integers that float64 cannot hold. Choose --format safetensors, h5 or npz.")
    return converted


def _value_type(tensors: LazyTensors) -> Any:
    narrow = all(spec.dtype in _AS_FLOAT32 for spec in tensors.specs.values())
    return pa.float32() if narrow else pa.float64()


def write_parquet_step(path: Path, step: int, tensors: LazyTensors, facts: dict[str, Any]) -> None:
    schema = _schema(_value_type(tensors), facts)
    with pq.ParquetWriter(str(path), schema, compression="zstd", write_page_checksum=True) as writer:
        for batch in _rows(step, tensors, schema):
            writer.write_batch(batch)


def write_arrow_step(path: Path, step: int, tensors: LazyTensors, facts: dict[str, Any]) -> None:
    schema = _schema(_value_type(tensors), facts)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in _rows(step, tensors, schema):
            writer.write_batch(batch)


def join_parquet(path: Path, parts: Sequence[Path]) -> None:
    files = [pq.ParquetFile(part) for part in parts]
    schema = _widest([file.schema_arrow for file in files])
    with pq.ParquetWriter(str(path), schema, compression="zstd", write_page_checksum=True) as writer:
        for file in files:
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group).cast(schema))


def join_arrow(path: Path, parts: Sequence[Path]) -> None:
    files = [pa.ipc.open_file(pa.memory_map(str(part))) for part in parts]
    schema = _widest([file.schema for file in files])
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, schema) as writer:
        for file in files:
            for group in range(file.num_record_batches):
                writer.write_table(pa.Table.from_batches([file.get_batch(group)]).cast(schema))


def _widest(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """float64 where one of the parts needs it."""
    return max(schemas, key=lambda schema: schema.field("values").type.value_type.bit_width)
