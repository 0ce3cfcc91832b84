"""Sketches merged over groups of sites and columns of steps, for pictures along the depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.run.catalog import Segment
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.pyramid import Columns, cover
from sonde.read.series.raw import RawStats, read_raw
from sonde.schema.sketch import INF, MAX, MIN, NAN, SUMABS, SUMSQ, Array, N

_FIELDS: Final = frozenset({N, NAN, INF, SUMSQ, SUMABS, MIN, MAX})


class Sums:
    """Sums of groups × columns; n is NaN where nothing was measured."""

    def __init__(self, num_groups: int, columns: Columns) -> None:
        self.columns = columns
        shape = num_groups, columns.count
        self.n, self.sumsq, self.sumabs, self.peak = (np.zeros(shape) for _ in range(4))
        self.is_odd = np.zeros(shape, np.bool_)

    def add(self, group: NDArray[np.intp], column: NDArray[np.int64], rows: Array) -> None:
        at = group, column
        np.add.at(self.n, at, rows[:, N] - rows[:, NAN] - rows[:, INF])
        np.add.at(self.sumsq, at, rows[:, SUMSQ])
        np.add.at(self.sumabs, at, rows[:, SUMABS])
        extremes = np.maximum(np.abs(rows[:, MIN]), np.abs(rows[:, MAX]))
        np.maximum.at(self.peak, at, np.where(np.isfinite(extremes), extremes, 0.0))
        np.logical_or.at(self.is_odd, at, rows[:, NAN] + rows[:, INF] > 0)

    def close(self) -> Sums:
        nothing = (self.n == 0) & ~self.is_odd
        self.n[self.n == 0] = np.nan
        self.peak[nothing] = np.nan
        return self


def read_sums(state: RunState, group_of: Mapping[int, int], num_groups: int, columns: Columns) -> Sums:
    """Read and merge sketches. `group_of` maps the id of each site to its group."""
    sums = Sums(num_groups, columns)
    if not group_of:
        return sums.close()
    table = np.zeros(max(group_of) + 1, np.intp)
    table[list(group_of)] = list(group_of.values())
    # File by file: sums need no sorting, and a part of a bucket in each of two files is added like any other row.
    files = cover(state, columns.level)
    sources = [files] if state.is_divided else [*([segment] for segment in files), []]
    for segments in sources:
        raw = _read(state, np.array(sorted(group_of)), columns, segments)
        if len(raw):
            sums.add(table[raw.site], np.clip(columns.of(raw.step), 0, columns.count - 1), raw.rows)
    return sums.close()


def _read(state: RunState, ids: NDArray[np.int64], columns: Columns, segments: Sequence[Segment]) -> RawStats:
    return read_raw(
        state,
        ids,
        StepFilter(Span(columns.first, columns.last)),
        _FIELDS,
        with_hist=False,
        segments=segments,
        with_live=not segments or state.is_divided,
    )
