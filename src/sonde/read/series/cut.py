"""Splitting of a long table into series, and downsampling of each.

Rows of a series are contiguous and ordered by step, as the readers return them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa

from sonde.schema.names import Series
from sonde.schema.thinning import group_starts, min_max
from sonde.schema.window import Column, once


def edges(table: pa.Table, columns: tuple[str, ...]) -> list[int]:
    """The starts of the series, and the end of the table; series are identified by these dictionary columns."""
    if not table.num_rows:
        return [0]
    codes = [table[name].unify_dictionaries().combine_chunks().indices.to_numpy() for name in columns]
    return [*group_starts(*codes).tolist(), table.num_rows]


def by_series(table: pa.Table, columns: tuple[str, ...]) -> dict[str, Column]:
    """Series by name, e.g. `grad/0.weight/norm`. Of values at the same step the last counts."""
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    bounds = edges(table, columns)
    series: dict[str, Column] = {}
    for start, end in pairwise(bounds):
        name = "/".join(table[column][start].as_py() for column in columns)
        series[name] = once(steps[start:end], values[start:end])
    return series


def series_of(name: str) -> Series:
    """Split the name of a series into kind, site and stat. Sites of other programs may contain "/".

    >>> series_of("grad/a/b/norm").site
    'a/b'
    """
    kind, _, rest = name.partition("/")
    site, _, stat = rest.rpartition("/")
    return Series(kind, site, stat)


def thin(table: pa.Table, num_buckets: int) -> pa.Table:
    """Downsample every series of a long table whose series are contiguous and ordered by step."""
    if not table.num_rows:
        return table
    columns = tuple(name for name in ("kind", "site", "stat", "name") if name in table.column_names)
    bounds = edges(table, columns)
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    kept = [start + min_max(steps[start:end], values[start:end], num_buckets) for start, end in pairwise(bounds)]
    return table.take(pa.array(np.concatenate(kept)))
