"""Stats of the layers of a run, early and late: the data for gradient flow and weight evolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.errors import CorruptError
from sonde.run import Run
from sonde.show.pooled import Floats, Pooled, pool_table

COLUMNS: Final = 120


@dataclass(frozen=True, slots=True)
class Measured:
    """Stats of the sites of one kind over intervals of steps; sites are in the order of the forward pass."""

    sites: tuple[str, ...]
    """Names without their kind."""
    is_matrix: np.ndarray
    """Whether each site has two dimensions or more: a layer's weight rather than a bias or a norm."""
    stats: dict[str, Pooled]

    def main(self) -> np.ndarray:
        """The sites for a profile along the depth: weights, if there are any."""
        return self.is_matrix if self.is_matrix.sum() > 1 else np.ones(len(self.sites), np.bool_)

    @property
    def is_odd(self) -> np.ndarray:
        return next(iter(self.stats.values())).is_odd


def measure(run: Run, kind: str, stats: tuple[str, ...]) -> Measured | None:
    """The stats of every site of a kind; None if nothing of this kind was recorded."""
    sites = run.sites(kind)
    if not sites.num_rows:
        return None
    patterns = [f"{kind}/*/{stat}" for stat in (*stats, "nonfinite_fraction")]
    try:
        table = run.overview(patterns, points=COLUMNS)
    except CorruptError:  # listed in the warnings, which are part of a report
        return None
    order = [f"{kind}/{name}" for name in sites["site"].to_pylist()]
    pooled = {stat: pool_table(table, stat, order, COLUMNS) for stat in stats}
    names = pooled[stats[0]].sites
    if not names:
        return None
    shapes = dict(zip(order, sites["shape"].to_pylist(), strict=True))
    return Measured(
        tuple(name.partition("/")[2] for name in names),
        np.array([len(shapes.get(name) or ()) >= 2 for name in names]),
        pooled,
    )


def first_odd(run: Run, kind: str, measured: Measured) -> tuple[str, int]:
    """The site with the first non-finite value, and its exact step."""
    pooled = next(iter(measured.stats.values()))
    column = int(np.flatnonzero(pooled.is_odd.any(axis=0))[0])
    row = int(np.flatnonzero(pooled.is_odd[:, column])[0])
    here = range(pooled.column_step(column), pooled.column_step(column + 1) + 1)
    table = run.stats(f"{kind}/*/nonfinite_fraction", steps=here)
    odd = table.filter(np.asarray(table["value"].to_numpy() > 0))
    if not odd.num_rows:  # known from merged steps only: the single steps are damaged
        return measured.sites[row], pooled.column_step(column)
    at = int(np.argmin(odd["step"].to_numpy()))
    return odd["site"][at].as_py(), odd["step"][at].as_py()


def early(values: Floats) -> Floats:
    """Median of the first quarter of the columns per site; NaN without data."""
    return _median(values[:, : max(values.shape[1] // 4, 1)])


def late(values: Floats) -> Floats:
    """Median of the last quarter of the columns that have data: after a NaN there is none."""
    held = np.flatnonzero(np.isfinite(values).any(axis=0))
    values = values[:, : int(held[-1]) + 1] if len(held) else values
    return _median(values[:, -max(values.shape[1] // 4, 1) :])


def first(values: Floats) -> Floats:
    """The first value of each site."""
    return np.array([row[np.isfinite(row)][0] if np.isfinite(row).any() else np.nan for row in values])


def last(values: Floats) -> Floats:
    """The last finite value of each site."""
    return np.array([row[np.isfinite(row)][-1] if np.isfinite(row).any() else np.nan for row in values])


def _median(values: Floats) -> Floats:
    return np.array([middle(row) for row in values])


def middle(values: Floats) -> float:
    """The median of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else np.nan


def ratio(a: Floats, b: Floats) -> Floats:
    """a / b; NaN where b is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(b > 0, a / b, np.nan)
