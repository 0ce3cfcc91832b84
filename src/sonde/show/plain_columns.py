"""A table for files that know only plain columns: dictionaries written out, nested values as JSON."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa

from sonde.schema.records import to_json


def plain_columns(table: pa.Table) -> pa.Table:
    """The same rows with columns of numbers and text only."""
    columns: list[Any] = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if pa.types.is_dictionary(field.type):
            column = column.cast(field.type.value_type)
        elif pa.types.is_nested(field.type):
            column = pa.array([None if value is None else to_json(value) for value in column.to_pylist()], pa.string())
        columns.append(column)
    return pa.Table.from_arrays(columns, names=table.column_names)


def unique_names(table: pa.Table) -> pa.Table:
    """The same table with no two columns of one name: SQL allows that, JSON and files do not."""
    names: list[str] = []
    for name in table.column_names:
        candidates = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return table.rename_columns(names)
