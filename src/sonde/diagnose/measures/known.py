"""Means, medians and extremes of what is known: NaN is left out; where nothing is known the answer is NaN, silently.

numpy's own warn then, and a warning may be an error in the user's program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

Reduction = Callable[..., Any]


def _silent(plain: Reduction, without_nan: Reduction) -> Reduction:
    def reduce(values: Any, axis: int | None = None) -> Any:
        array = np.asarray(values, np.float64)
        is_known = ~np.isnan(array)
        if axis is None:
            return float(plain(array[is_known])) if is_known.any() else np.nan
        nothing = ~is_known.any(axis=axis)
        result = np.asarray(without_nan(np.where(np.expand_dims(nothing, axis), 0.0, array), axis=axis))
        return np.where(nothing, np.nan, result)

    return reduce


nanmean: Final = _silent(np.mean, np.nanmean)
nanmedian: Final = _silent(np.median, np.nanmedian)
nanmax: Final = _silent(np.max, np.nanmax)
nanmin: Final = _silent(np.min, np.nanmin)
nanstd: Final = _silent(np.std, np.nanstd)
