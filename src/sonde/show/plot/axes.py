"""Choice of logarithmic axes, and short names for labels. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from sonde.show.plot.style import label

DECADES: Final = 2.0
"""Values that span more than this are drawn on a logarithmic axis."""


def spans_decades(columns: Iterable[np.ndarray]) -> bool:
    """Whether all values are positive (a few zeros aside) and span more than two powers of ten.

    >>> spans_decades([np.array([1e-4, 1.0])]), spans_decades([np.array([-1.0, 1e9])])
    (True, False)
    """
    values = np.concatenate([np.empty(0), *columns])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if not len(positive) or (values < 0).any() or len(positive) < 0.5 * len(values):
        return False
    low, high = np.quantile(positive, 0.01, method="lower"), np.quantile(positive, 0.99, method="higher")
    typical, peak = np.log10(high) - np.log10(low), np.log10(positive.max()) - np.log10(np.median(positive))
    return bool(typical > DECADES or peak > DECADES)


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Shorten names to the parts that differ, and put the shared parts into the axis label.

    >>> short_names(["grad/0.weight/rms", "grad/2.weight/rms"])
    (['0.weight', '2.weight'], 'grad rms')
    """
    parts = [name.split("/") for name in names]
    if len(names) < 2 or any(len(part) != 3 for part in parts):
        return [label(name) for name in names], label(names[0]) if len(names) == 1 else ""
    kinds, _, stats = (set(column) for column in zip(*parts, strict=True))
    kept = [index for index, same in enumerate((len(kinds) == 1, False, len(stats) == 1)) if not same]
    shared = " ".join(sorted(kinds) * (len(kinds) == 1) + sorted(stats) * (len(stats) == 1))
    return [label("/".join(part[index] for index in kept)) for part in parts], label(shared)
