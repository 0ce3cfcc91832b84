"""Sites × stretches of steps, filled while a run is written: each new row is looked at once, memory stays bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from sonde.schema.pooling import MISSING
from sonde.show.pooled import Pooled, cells_of, rows_of

COLUMNS: Final = 256


class LivePool:
    """Stretches double in length whenever the columns are full, so that a run of any length fits."""

    def __init__(self, stat: str, num_columns: int = COLUMNS) -> None:
        self.stat, self.num_columns = stat, num_columns
        self.row_of: dict[str, int] = {}
        self.first_step, self.steps_per_column = -1, 1
        self.cells = np.full((0, num_columns), float(MISSING))

    def add(self, table: pa.Table, order: Sequence[str] = ()) -> None:
        """Take in rows of a long table; rows that were taken in before change nothing."""
        if not table.num_rows:
            return
        steps = table["step"].to_numpy()
        if self.first_step < 0:
            self.first_step = int(steps.min())
        while (int(steps.max()) - self.first_step) // self.steps_per_column >= self.num_columns:
            self._halve()
        names, row_of = rows_of(table, order)
        rows = self._rows(names)[row_of]
        columns = np.maximum(steps - self.first_step, 0) // self.steps_per_column
        np.maximum.at(self.cells, (rows, columns), cells_of(table, self.stat))

    def _rows(self, names: Sequence[str]) -> np.ndarray:
        for name in names:
            self.row_of.setdefault(name, len(self.row_of))
        self.cells = self._padded(self.cells, len(self.row_of))
        return np.array([self.row_of[name] for name in names], np.intp)

    def _padded(self, cells: np.ndarray, num_rows: int) -> np.ndarray:
        missing = ((0, num_rows - len(cells)), (0, self.num_columns - cells.shape[1]))
        return np.pad(cells, missing, constant_values=float(MISSING))

    def _halve(self) -> None:
        """Two columns become one."""
        pairs = self.cells.reshape(len(self.cells), self.num_columns // 2, 2)
        self.cells = self._padded(pairs.max(axis=2), len(self.cells))
        self.steps_per_column *= 2

    def pooled(self) -> Pooled:
        """What is there now, without the columns that are still to come."""
        used = np.flatnonzero((self.cells > MISSING).any(axis=0))
        end = int(used[-1]) + 1 if len(used) else 0
        cells = self.cells[:, :end].copy()
        return Pooled(tuple(self.row_of), max(self.first_step, 0), float(self.steps_per_column), cells)
