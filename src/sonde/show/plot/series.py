"""The data of a figure: the series that match patterns, downsampled without losing spikes, and the steps of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import UnknownNameError, UsageError
from sonde.run import Run
from sonde.schema.names import KINDS, matches

POINTS: Final = 1500
"""Number of buckets of a line, of which minimum and maximum are drawn: more than a page has dots."""
_OF_TENSORS: Final = "Whole tensors, like param/0.weight, need the style evolution or spectra."


@dataclass(frozen=True, slots=True)
class Series:
    """One line, and the steps at which it, or a part of its tensor, was non-finite."""

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    odd_steps: NDArray[np.int64]


def is_stat(run: Run, pattern: str) -> bool:
    """Whether a pattern names a stat of sites, like `grad/*/rms`; anything else names scalars, like `val/loss`."""
    parts = pattern.split("/")
    return len(parts) == 3 and any(matches(parts[0], kind) for kind in set(run.sites()["kind"].to_pylist()))


def read_series(run: Run, patterns: Sequence[str], steps: Any) -> list[Series]:
    """Every series that matches the patterns, each once, in the order of the patterns."""
    found: dict[str, Series] = {}
    for pattern in patterns:
        for series in (_stats if is_stat(run, pattern) else _scalars)(run, pattern, steps):
            found.setdefault(series.name, series)
    if not found:
        raise UsageError(
            f"nothing in {run.project}/{run.name} matches {', '.join(patterns)}. `run.sites()` lists the sites for "
            'patterns like "grad/*/rms", and `run.scalars()` the logged numbers. '
            f"{_OF_TENSORS}"
        )
    return list(found.values())


def _stats(run: Run, pattern: str, steps: Any) -> list[Series]:
    kind, site, _ = pattern.split("/")
    columns = run.lines(pattern, steps=steps, points=POINTS)
    odd = run.lines(f"{kind}/{site}/nonfinite_fraction", steps=steps, points=POINTS)
    return [
        _series(name, column, odd.get(f"{name.rpartition('/')[0]}/nonfinite_fraction"))
        for name, column in columns.items()
    ]


def _scalars(run: Run, pattern: str, steps: Any) -> list[Series]:
    try:
        found = run.scalar_lines(pattern, steps=steps, points=POINTS)
    except UnknownNameError as error:
        if pattern.partition("/")[0] not in KINDS:
            raise
        raise UsageError(f"{error} {_OF_TENSORS}") from None
    return [_series(name, column, None) for name, column in found.items()]


def _series(name: str, column: tuple[Any, Any], odd: tuple[Any, Any] | None) -> Series:
    steps, values = column
    odd_steps = steps[~np.isfinite(values)]
    if odd is not None:
        odd_steps = np.union1d(odd_steps, odd[0][odd[1] > 0])
    return Series(name, steps, values, odd_steps)
