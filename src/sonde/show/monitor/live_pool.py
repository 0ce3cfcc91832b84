"""Sites × stretches of steps, filled while a run is written: each new row is looked at once, memory stays bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from sonde.show.pooled import Pooled, pool_table

COLUMNS: Final = 256


class LivePool:
    """Stretches double in length whenever the columns are full, so that a run of any length fits."""

    def __init__(self, stat: str, num_columns: int = COLUMNS) -> None:
        self.stat, self.num_columns = stat, num_columns
        self.row_of: dict[str, int] = {}
        self.first_step, self.steps_per_column = -1, 1
        self.highest = np.full((0, num_columns), -np.inf)
        self.is_odd = np.zeros((0, num_columns), np.bool_)

    def add(self, table: pa.Table, order: Sequence[str] = ()) -> None:
        """Take in rows of a long table; rows that were taken in before change nothing."""
        if not table.num_rows:
            return
        steps = table["step"].to_numpy()
        first, last = int(steps.min()), int(steps.max())
        if self.first_step < 0:
            self.first_step = first
        while (last - self.first_step) // self.steps_per_column >= self.num_columns:
            self._halve()
        # One column of the new part for each step or stretch, then into the column it belongs to.
        part = pool_table(table, self.stat, order, last - first + 1 if last - first < 4096 else 4096)
        rows = self._rows(part.sites)
        starts = np.array([part.column_step(column) for column in range(part.values.shape[1])], np.int64)
        columns = np.maximum(starts - self.first_step, 0) // self.steps_per_column
        where = (rows[:, None], columns[None, :])
        np.maximum.at(self.highest, where, np.where(np.isfinite(part.values), part.values, -np.inf))
        np.logical_or.at(self.is_odd, where, part.is_odd)

    def _rows(self, names: Sequence[str]) -> np.ndarray:
        for name in names:
            self.row_of.setdefault(name, len(self.row_of))
        missing = len(self.row_of) - len(self.highest)
        if missing:
            self.highest = np.vstack([self.highest, np.full((missing, self.num_columns), -np.inf)])
            self.is_odd = np.vstack([self.is_odd, np.zeros((missing, self.num_columns), np.bool_)])
        return np.array([self.row_of[name] for name in names], np.intp)

    def _halve(self) -> None:
        """Two columns become one."""
        half = self.num_columns // 2
        shape = (len(self.highest), half, 2)
        empty = np.full((len(self.highest), half), -np.inf)
        self.highest = np.hstack([self.highest.reshape(shape).max(axis=2), empty])
        self.is_odd = np.hstack([self.is_odd.reshape(shape).any(axis=2), np.zeros_like(empty, np.bool_)])
        self.steps_per_column *= 2

    def pooled(self) -> Pooled:
        """What is there now, without the columns that are still to come."""
        used = np.flatnonzero(np.isfinite(self.highest).any(axis=0) | self.is_odd.any(axis=0))
        end = int(used[-1]) + 1 if len(used) else 0
        highest = self.highest[:, :end]
        values = np.where(np.isfinite(highest), highest, np.nan)
        return Pooled(
            tuple(self.row_of),
            max(self.first_step, 0),
            float(self.steps_per_column),
            values,
            self.is_odd[:, :end].copy(),
        )
