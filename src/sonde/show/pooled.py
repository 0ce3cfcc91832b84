"""A stat of many sites over steps, pooled into as many columns as fit. Spikes and NaN always remain visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.run import Run
from sonde.schema.old_names import current_stat
from sonde.schema.thinning import MISSING, NOT_FINITE

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
COLUMNS: Final = 256
"""Number of columns of a pool that is filled while a run is written."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A pooled stat: rows are sites in the order of their first measurement, columns are equal intervals of steps."""

    sites: tuple[str, ...]
    """`kind/site`."""
    first_step: int
    steps_per_column: float
    cells: Floats
    """(sites, columns): the maximum of each interval, as in schema/thinning.py: +inf where a value was non-finite,
    -inf where nothing was recorded."""

    @property
    def values(self) -> Floats:
        """(sites, columns): NaN without a finite value, or if the value covers only the finite part of a tensor."""
        return np.where(np.isfinite(self.cells), self.cells, np.nan)

    @property
    def is_odd(self) -> Bools:
        """(sites, columns): whether a value in the interval was NaN or infinite."""
        return np.isposinf(self.cells)

    @property
    def bounds(self) -> tuple[float, float]:
        """Minimum and maximum finite value; NaN if there is none."""
        finite = self.cells[np.isfinite(self.cells)]
        return (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)

    def column_step(self, column: int) -> int:
        return int(self.first_step + column * self.steps_per_column)


def pool(run: Run, pattern: str, *, width: int, steps: Any = None) -> Pooled:
    """Pool the series of one stat that match a pattern, e.g. `grad/*/rms`, into at most `width` columns."""
    kind, site, stat = pattern.split("/")
    # Non-finite values are counted separately: a norm looks healthy while half the tensor is NaN.
    odd = f"{kind}/{site}/nonfinite_fraction"
    wanted = [pattern] if stat == "nonfinite_fraction" else [pattern, odd]
    return pool_table(run.overview(wanted, steps=steps, points=width), current_stat(stat), _order(run), width)


def pool_table(table: pa.Table, stat: str, order: Sequence[str], width: int) -> Pooled:
    """Pool a long table (step, kind, site, stat, value) that has already been read."""
    if not table.num_rows:
        return Pooled((), 0, 1.0, np.empty((0, 0)))
    names, row_of = rows_of(table, order)
    steps = table["step"].to_numpy()
    first, span = int(steps.min()), int(steps.max()) - int(steps.min()) + 1
    num_columns = min(width, span)
    cells = np.full((len(names), num_columns), float(MISSING))
    np.maximum.at(cells, (row_of, (steps - first) * num_columns // span), cells_of(table, stat))
    return Pooled(names, first, span / num_columns, cells)


def cells_of(table: pa.Table, stat: str) -> Floats:
    """The cell for each row of a table that holds one stat and the non-finite fraction of the same sites."""
    values = table["value"].to_numpy()
    own = np.where(np.isfinite(values), values, NOT_FINITE)
    # A stat of a tensor without finite elements is NaN; a non-finite fraction above zero marks some elements.
    is_odd = _codes(table, "stat", "nonfinite_fraction") & (values > 0)
    return np.where(is_odd, NOT_FINITE, np.where(_codes(table, "stat", stat), own, MISSING))


def rows_of(table: pa.Table, order: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The names of the rows, and the row of each value."""
    kinds, sites = (table[name].unify_dictionaries().combine_chunks() for name in ("kind", "site"))
    num_sites = max(len(sites.dictionary), 1)
    pair = kinds.indices.to_numpy().astype(np.int64) * num_sites + sites.indices.to_numpy()
    present, inverse = np.unique(pair, return_inverse=True)
    kind_names, site_names = kinds.dictionary.to_pylist(), sites.dictionary.to_pylist()
    names = [f"{kind_names[code // num_sites]}/{site_names[code % num_sites]}" for code in present.tolist()]
    rank = {name: number for number, name in enumerate(order)}
    ranked = sorted(range(len(names)), key=lambda index: (rank.get(names[index], len(rank)), names[index]))
    place = np.empty(len(names), np.int64)
    place[ranked] = np.arange(len(names))
    return tuple(names[index] for index in ranked), place[inverse]


def _codes(table: pa.Table, column: str, wanted: str) -> Bools:
    """A mask of the rows with this value in a dictionary column."""
    coded = table[column].unify_dictionaries().combine_chunks()
    words = coded.dictionary.to_pylist()
    if wanted not in words:
        return np.zeros(table.num_rows, np.bool_)
    is_it: Bools = coded.indices.to_numpy() == words.index(wanted)
    return is_it


def _order(run: Run) -> list[str]:
    table = run.sites()
    return [f"{kind}/{site}" for kind, site in zip(table["kind"].to_pylist(), table["site"].to_pylist(), strict=True)]


class LivePool:
    """A pool whose intervals double in length whenever its columns are full, so that a run of any length fits."""

    def __init__(self, stat: str, num_columns: int = COLUMNS) -> None:
        self.stat, self.num_columns = stat, num_columns
        self.row_of: dict[str, int] = {}
        self.first_step, self.steps_per_column = -1, 1
        self.cells = np.full((0, num_columns), float(MISSING))

    def add(self, table: pa.Table, order: Sequence[str] = ()) -> None:
        """Add rows of a long table; rows that were added before change nothing."""
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
        """Merge columns in pairs."""
        pairs = self.cells.reshape(len(self.cells), self.num_columns // 2, 2)
        self.cells = self._padded(pairs.max(axis=2), len(self.cells))
        self.steps_per_column *= 2

    def pooled(self) -> Pooled:
        """The pool so far, without the columns that are still empty."""
        used = np.flatnonzero((self.cells > MISSING).any(axis=0))
        end = int(used[-1]) + 1 if len(used) else 0
        cells = self.cells[:, :end].copy()
        return Pooled(tuple(self.row_of), max(self.first_step, 0), float(self.steps_per_column), cells)
