"""Compact notation for table schemas."""

from __future__ import annotations

import pyarrow as pa


def schema_of(text: str) -> pa.Schema:
    """A schema of `name:type` pairs, with a list in brackets.

    >>> schema_of("step:int64 shape:[int64]").types
    [DataType(int64), ListType(list<item: int64>)]
    """
    return pa.schema([(name, _type(type)) for name, _, type in (pair.partition(":") for pair in text.split())])


def _type(name: str) -> pa.DataType:
    return pa.list_(_type(name[1:-1])) if name.startswith("[") else pa.type_for_alias(name)
