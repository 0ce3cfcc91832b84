"""The statistics of one tensor that the analysis needs, for all tensors of a pass at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sonde.schema.sketch import INF, MAX, MIN, NAN, SUMABS, SUMSQ, ZERO, Array, N


class Sketch(NamedTuple):
    """Plain Python numbers: those of numpy, one at a time, take ten times as long."""

    n: float
    mean_abs: float
    max_abs: float
    norm: float
    rms: float
    zero_fraction: float
    nonfinite: int


def sketches_of(rows: Array) -> list[Sketch]:
    """One for each row. For a tensor without a finite value only the number of elements is known."""
    n, squares = rows[:, N], rows[:, SUMSQ]
    finite = n - rows[:, NAN] - rows[:, INF]
    is_known = finite > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = (
            n,
            np.where(is_known, rows[:, SUMABS] / finite, 0.0),
            np.where(is_known, np.maximum(np.abs(rows[:, MIN]), np.abs(rows[:, MAX])), 0.0),
            np.sqrt(squares),
            np.where(is_known, np.sqrt(squares / finite), 0.0),
            np.where(n > 0, rows[:, ZERO] / n, 0.0),
            np.where(is_known, n - finite, n).astype(np.int64),
        )
    return list(map(Sketch._make, zip(*(column.tolist() for column in columns), strict=True)))
