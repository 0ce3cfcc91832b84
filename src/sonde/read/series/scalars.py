"""Logged scalars by name, sealed and live, every logged value once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.errors import CorruptError, UnknownNameError
from sonde.read.run.catalog import Segment
from sonde.read.run.segments import damaged
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.schema.names import matches_scalar
from sonde.schema.old_names import current_scalar
from sonde.schema.records import ScalarsRecord

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("name", pa.dictionary(pa.int32(), pa.string())),
        ("value", pa.float64()),
        ("time", pa.float64()),
    ]
)
_DTYPES = {"step": np.int64, "name": np.int64, "time": np.float64, "value": np.float64}

Columns = dict[str, NDArray[Any]]


def read_scalars(state: RunState, patterns: str | Sequence[str], steps: StepFilter) -> pa.Table:
    """Rows ordered by (name, step); values logged twice at one step are both included, in logging order."""
    return read_named(state, find_names(state.catalog.require().scalar_names, patterns), steps)


def read_named(state: RunState, names: dict[int, str], steps: StepFilter) -> pa.Table:
    """Like `read_scalars`, for scalars given by id."""
    parts, errors = _own_parts(state, names, steps)
    for rank, shown in state.scalar_homes(names):
        more, damage = _own_parts(rank, {own: names[id] for own, id in shown.items()}, steps)
        parts += [_renamed(part, shown) for part in more]
        errors += damage
    table = scalar_table(names, parts, steps)
    if errors and not table.num_rows:
        raise errors[0]
    return table


def _renamed(part: Columns, shown: dict[int, int]) -> Columns:
    """Rows of another rank under the ids that the names have in the run."""
    part = {key: column[np.isin(part["name"], list(shown))] for key, column in part.items()}
    return {**part, "name": np.array([shown[id] for id in part["name"].tolist()], np.int64)}


def _own_parts(state: RunState, names: dict[int, str], steps: StepFilter) -> tuple[list[Columns], list[CorruptError]]:
    parts: list[Columns] = []
    errors: list[CorruptError] = []
    for segment in state.segments_of("scalars"):
        try:
            columns = sealed_scalars(state, segment, names, steps)
        except CorruptError as error:
            state.damage[segment.name] = str(error)
            errors.append(error)
            continue
        if columns is not None:
            parts.append(columns)
    for frame in state.live_frames("scalars"):
        if isinstance(frame.record, ScalarsRecord):
            parts.append(record_columns(frame.record))
    return parts, errors


def sealed_scalars(state: RunState, segment: Segment, names: dict[int, str], steps: StepFilter) -> Columns | None:
    """A segment's columns; None if it has none of the names."""
    table = state.segments.read(segment, "name", np.array(sorted(names), np.int64), steps.span, list(_DTYPES))
    if table is None:
        return None
    _check_types(segment, table)
    return {column: table[column].to_numpy() for column in _DTYPES}


def record_columns(record: ScalarsRecord) -> Columns:
    return {"step": record.steps, "name": record.name_ids, "time": record.times, "value": record.values}


def _check_types(segment: Segment, table: pa.Table) -> None:
    expected = {"step": pa.int64(), "name": pa.int32(), "time": pa.float64(), "value": pa.float64()}
    for name, type in expected.items():
        if name not in table.column_names:
            raise damaged(segment, f"column {name} is missing")
        if table[name].type != type or table[name].null_count:
            raise damaged(segment, f"column {name} does not have type {type}")


def find_names(known: dict[int, str], patterns: str | Sequence[str], *, strict: bool = True) -> dict[int, str]:
    """Scalars that match globs. A plain name that was never logged is an error that suggests the closest match."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    found = {number: name for number, name in known.items() if matches_scalar(patterns, name)}
    for pattern in patterns if strict else ():
        if known and not any(sign in pattern for sign in "*?[") and current_scalar(pattern) not in found.values():
            raise UnknownNameError("scalar", pattern, known.values())
    return found


def scalar_table(names: dict[int, str], parts: list[Columns], steps: StepFilter) -> pa.Table:
    columns = {
        key: np.concatenate([np.empty(0, type), *(part[key] for part in parts)]) for key, type in _DTYPES.items()
    }
    keep = np.isin(columns["name"], np.array(sorted(names), np.int64)) & steps.mask(columns["step"])
    columns = {key: column[keep] for key, column in columns.items()}
    words = sorted(set(names.values()))
    code_of = {word: code for code, word in enumerate(words)}
    present, inverse = np.unique(columns["name"], return_inverse=True)
    codes = np.array([code_of[names[int(number)]] for number in present], np.int32)[inverse]
    order = np.lexsort((columns["step"], codes))
    return pa.Table.from_arrays(
        [
            pa.array(columns["step"][order]),
            pa.DictionaryArray.from_arrays(pa.array(codes[order].astype(np.int32)), pa.array(words, pa.string())),
            pa.array(columns["value"][order]),
            pa.array(columns["time"][order]),
        ],
        schema=SCHEMA,
    )
