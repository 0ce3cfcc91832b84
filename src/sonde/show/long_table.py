"""A table of numbers over steps, split into series: one for each combination of words and each column of numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sonde.run import Table
from sonde.schema.window import Column

_NOT_VALUES: Final = frozenset({"step", "time", "id", "attempt", "last_step"})


class LongTable:
    """The series of a table by number, each as steps and values; none if the table has no column `step`."""

    def __init__(self, table: Table) -> None:
        types = dict(zip(table.column_names, table.schema.types, strict=True))
        has_steps = _is_number(types.get("step"))
        self._table: pa.Table = table.arrow.filter(pc.is_finite(table["step"])) if has_steps else table.arrow
        self.values = _value_columns(types) if has_steps and self._table.num_rows else []
        keys = [name for name, type in types.items() if _is_word(type)] if self.values else []
        self._first, self._group = _groups(self._table, keys)
        self.names = [
            "/".join(
                [*(str(self._table[key][int(row)].as_py()) for key in keys), *([] if value == "value" else [value])]
            )
            for row in self._first
            for value in self.values
        ]

    def __len__(self) -> int:
        return len(self.names)

    def series(self, number: int) -> Column:
        """The series with this number, ordered by step."""
        group, column = divmod(number, len(self.values))
        rows = np.flatnonzero(self._group == group)
        steps = self._table["step"].to_numpy()[rows].astype(np.int64)
        values = self._table[self.values[column]].to_numpy()[rows].astype(np.float64)
        order = np.argsort(steps, kind="stable")
        return steps[order], values[order]


def _value_columns(types: dict[str, Any]) -> list[str]:
    if _is_number(types.get("value")):
        return ["value"]
    return [name for name, type in types.items() if name not in _NOT_VALUES and _is_number(type)]


def _is_number(type: Any) -> bool:
    return type is not None and bool(pa.types.is_integer(type) or pa.types.is_floating(type))


def _is_word(type: Any) -> bool:
    inner = type.value_type if pa.types.is_dictionary(type) else type
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner))


def _groups(table: pa.Table, keys: list[str]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The first row of each combination of keys, in order, and the combination of each row."""
    codes = np.zeros(table.num_rows, np.int64)
    for key in keys:
        words = table[key]
        encoded = (words if pa.types.is_dictionary(words.type) else words.dictionary_encode()).unify_dictionaries()
        own = encoded.combine_chunks().indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        _, codes = np.unique(codes * (own.max(initial=0) + 2) + own + 1, return_inverse=True)
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.sort(first), rank[inverse]
