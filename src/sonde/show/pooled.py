"""A stat of many sites over steps, squeezed into as many columns as there is room for. A spike or a NaN never hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.run import Run

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Rows are sites in the order in which they were first measured, columns are equal stretches of steps."""

    sites: tuple[str, ...]
    """`kind/site`."""
    first_step: int
    steps_per_column: float
    values: Floats
    """(sites, columns): the largest finite value of each stretch; NaN where there is none."""
    is_odd: Bools
    """(sites, columns): whether something in the stretch was NaN or infinite."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest finite value; NaN when there is none."""
        finite = self.values[np.isfinite(self.values)]
        return (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)

    def column_step(self, column: int) -> int:
        return int(self.first_step + column * self.steps_per_column)


def pool(run: Run, pattern: str, *, width: int, steps: Any = None) -> Pooled:
    """What one pattern with one stat names, as in `grad/*/rms`, in at most `width` columns."""
    kind, site, stat = pattern.split("/")
    # Values that are not finite are counted beside the moments: a norm looks healthy while half the tensor is NaN.
    odd = f"{kind}/{site}/nonfinite_fraction"
    wanted = [pattern] if stat == "nonfinite_fraction" else [pattern, odd]
    return pool_table(run.overview(wanted, steps=steps, points=width), stat, _order(run), width)


def pool_table(table: pa.Table, stat: str, order: Sequence[str], width: int) -> Pooled:
    """The same of a long table (step, kind, site, stat, value) that was read already."""
    names, row_of = _rows(table, order)
    if not table.num_rows:
        return Pooled((), 0, 1.0, np.empty((0, 0)), np.empty((0, 0), np.bool_))
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    is_value = _codes(table, "stat", stat)
    first, span = int(steps.min()), int(steps.max()) - int(steps.min()) + 1
    num_columns = min(width, span)
    column = (steps - first) * num_columns // span
    highest = np.full((len(names), num_columns), -np.inf)
    finite = is_value & np.isfinite(values)
    np.maximum.at(highest, (row_of[finite], column[finite]), values[finite])
    is_odd = np.zeros(highest.shape, np.bool_)
    # A stat of a tensor without finite elements is NaN; a share of NaN above zero says the same of some elements.
    odd = (is_value & ~np.isfinite(values)) | (_codes(table, "stat", "nonfinite_fraction") & (values > 0))
    is_odd[row_of[odd], column[odd]] = True
    return Pooled(names, first, span / num_columns, np.where(np.isfinite(highest), highest, np.nan), is_odd)


def _rows(table: pa.Table, order: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Names of the rows, and the row of each value."""
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
    """Which rows have this value in a dictionary column."""
    coded = table[column].unify_dictionaries().combine_chunks()
    words = coded.dictionary.to_pylist()
    if wanted not in words:
        return np.zeros(table.num_rows, np.bool_)
    is_it: Bools = coded.indices.to_numpy() == words.index(wanted)
    return is_it


def _order(run: Run) -> list[str]:
    table = run.sites()
    return [f"{kind}/{site}" for kind, site in zip(table["kind"].to_pylist(), table["site"].to_pylist(), strict=True)]
