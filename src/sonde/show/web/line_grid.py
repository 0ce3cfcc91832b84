"""Several series on one axis of steps: all values if there are few, otherwise minimum and maximum per interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array
from sonde.schema.thinning import extremes, group_starts
from sonde.schema.window import Column, once
from sonde.show.web.wire import Reply, binary_reply


@dataclass(frozen=True, slots=True)
class Line:
    """A series as it was read; `i` is -1 if it has only a name."""

    i: int
    name: str
    column: Column
    odd_steps: NDArray[np.int64] | None = None
    """Additional steps to mark: a part of the tensor was non-finite, and the value covers only the rest."""


def lines_reply(
    lines: Sequence[Line],
    span: tuple[int, int],
    points: int,
    *,
    last_step: int,
    is_merged: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Reply:
    """Lines in the format of api.ts."""
    columns = [once(*line.column) for line in lines]
    steps, values, width = _grid(columns, span, points)
    odd = [_nonfinite(column, line.odd_steps, width) for column, line in zip(columns, lines, strict=True)]
    series = [{"i": line.i, "name": line.name, "num_nonfinite": len(own)} for line, own in zip(lines, odd, strict=True)]
    header = {
        "last_step": last_step,
        "from": span[0],
        "to": span[1],
        "steps_per_bucket": width,
        "is_merged": is_merged,
        "series": series,
        **(more or {}),
    }
    buffers = {
        "steps": ("f64", steps),
        "values": ("f64", np.concatenate([np.empty(0), *values])),
        "nonfinite": ("f64", np.concatenate([np.empty(0), *odd])),
    }
    return binary_reply(header, buffers)


def _grid(columns: Sequence[Column], span: tuple[int, int], points: int) -> tuple[Array, list[Array], int]:
    union = _union([steps for steps, _ in columns])
    if len(union) <= 2 * points:
        values = []
        for steps, own in columns:
            row = np.full(len(union), np.nan)
            row[np.searchsorted(union, steps)] = np.where(np.isfinite(own), own, np.nan)
            values.append(row)
        return union.astype(np.float64), values, 0
    first, last = int(union[0]), int(union[-1])
    width = max(1, -(-(last - first + 1) // points))
    buckets = np.unique((union - first) // width)
    rows = [_extremes(steps, own, first, width, buckets) for steps, own in columns]
    axis = np.repeat(first + buckets * width, 2).astype(np.float64)
    axis[1::2] += width / 2
    return axis, rows, width


def _union(all_steps: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    if not all_steps:
        return np.empty(0, np.int64)
    first = all_steps[0]
    if all(steps is first or np.array_equal(steps, first) for steps in all_steps):
        return first
    return np.unique(np.concatenate(all_steps))


def _extremes(steps: NDArray[np.int64], values: Array, first: int, width: int, buckets: NDArray[np.int64]) -> Array:
    """Minimum and maximum of each bucket, in order of occurrence; NaN for an empty bucket."""
    row = np.full((len(buckets), 2), np.nan)
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if not len(steps):
        return row.reshape(-1)
    bucket = (steps - first) // width
    lowest, highest = extremes(bucket, values)
    pair = np.sort([lowest, highest], axis=0)
    row[np.searchsorted(buckets, bucket[lowest])] = values[pair].T
    return row.reshape(-1)


def _nonfinite(column: Column, more: NDArray[np.int64] | None, width: int) -> Array:
    """Steps of non-finite values: the first of each bucket."""
    steps = column[0][~np.isfinite(column[1])]
    if more is not None and len(more):
        steps = np.union1d(steps, more)
    if width > 1 and len(steps):
        steps = steps[group_starts(steps // width)]
    return steps.astype(np.float64)
