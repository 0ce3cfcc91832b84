"""Flat tables for formats without nesting: dictionary columns are expanded, nested values become JSON."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from sonde.schema.records import to_json


def plain_columns(table: pa.Table) -> pa.Table:
    """The same rows, with only numbers and text."""
    columns: list[Any] = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if pa.types.is_dictionary(field.type):
            column = column.cast(field.type.value_type)
        elif pa.types.is_nested(field.type):
            column = pa.array([None if value is None else to_json(value) for value in column.to_pylist()], pa.string())
        columns.append(column)
    return pa.Table.from_arrays(columns, names=table.column_names)
