"""The last rows of some series, by site: the input of a rule. Pure data; a window never reads a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sonde.schema.names import Series, current_series, matches, matches_stat, split_pattern
from sonde.schema.sketch import Array

Column = tuple[NDArray[np.int64], Array]
"""Steps, each once and ascending, and their values."""
Measure = TypeVar("Measure")


def once(steps: NDArray[np.int64], values: Array) -> Column:
    """A column of values in the order in which they came; of values at the same step the last counts.

    >>> [part.tolist() for part in once(np.array([1, 0, 1]), np.array([5.0, 6.0, 7.0]))]
    [[0, 1], [6.0, 7.0]]
    """
    if (steps[1:] > steps[:-1]).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    is_last = np.append(steps[1:] != steps[:-1], True)
    return steps[is_last], values[is_last]


def ends(column: Column | None) -> tuple[float | None, float | None, float | None]:
    """The last value, and the lowest and highest finite one; None if there is none."""
    if column is None or not len(column[1]):
        return None, None, None
    values = column[1]
    finite = values[np.isfinite(values)]
    return (
        float(values[-1]),
        float(finite.min()) if len(finite) else None,
        float(finite.max()) if len(finite) else None,
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """One stat of many sites over common steps; NaN if a site lacks a step."""

    sites: tuple[str, ...]
    steps: NDArray[np.int64]
    values: Array
    """(sites, steps)"""

    def __len__(self) -> int:
        return len(self.sites)

    def row(self, site: str) -> Array:
        row: Array = self.values[self.sites.index(site)]
        return row


@dataclass(frozen=True, slots=True)
class Window:
    """Series with their own steps, scalars likewise, and facts about the run.

    >>> steps = np.arange(3)
    >>> window = Window({Series("grad", "0.weight", "rms"): (steps, np.ones(3))})
    >>> [site for site, _, values in window.by_site("grad/*/rms")]
    ['0.weight']
    """

    series: Mapping[Series, Column] = field(default_factory=dict)
    scalars: Mapping[str, Column] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    _index: dict[tuple[str, str], list[Series]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _grids: dict[str, Grid] = field(default_factory=dict, init=False, repr=False, compare=False)
    notes: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results computed once for this window, shared by all rules."""

    def __post_init__(self) -> None:
        for name in self.series:
            self._index.setdefault((name.kind, name.stat), []).append(name)

    def by_site(self, pattern: str) -> Iterator[tuple[str, NDArray[np.int64], Array]]:
        """(site, steps, values) of every series that matches a pattern, in the order of first measurement."""
        for name in self.names(pattern):
            steps, values = self.series[name]
            yield name.site, steps, values

    def names(self, pattern: str) -> list[Series]:
        """The series that match a pattern `kind/site/stat`."""
        kind, site, stat = split_pattern(pattern)
        found = [
            name
            for (own_kind, own_stat), names in self._index.items()
            if matches(kind, own_kind) and matches_stat(stat, own_stat)
            for name in names
        ]
        return found if site == "*" else [name for name in found if matches(site, name.site)]

    def get(self, name: str) -> Column:
        """One series or scalar by its full name; empty if it was not measured.

        >>> Window(scalars={"loss": (np.arange(2), np.ones(2))}).get("loss")[1].tolist()
        [1.0, 1.0]
        """
        found = self._find(name)
        if found is None and (current := current_series(name)) != name:
            found = self._find(current)
        return found if found is not None else (np.empty(0, np.int64), np.empty(0))

    def _find(self, name: str) -> Column | None:
        # From both ends: in a run that was not written by us, a site may contain slashes.
        kind, _, rest = name.partition("/")
        site, _, stat = rest.rpartition("/")
        return self.series.get(Series(kind, site, stat)) or self.scalars.get(name)

    def grid(self, pattern: str) -> Grid:
        """The series of a pattern side by side."""
        known = self._grids.get(pattern)
        if known is None:
            known = self._grids[pattern] = _grid([(n.site, *self.series[n]) for n in self.names(pattern)])
        return known

    @property
    def last_step(self) -> int:
        """The newest step of all; -1 if there is none. System samples do not count: one may be taken at the next step,
        which may never be made."""
        logged = [column for name, column in self.scalars.items() if not name.startswith("system/")]
        columns = [*self.series.values(), *logged]
        return max((int(steps[-1]) for steps, _ in columns if len(steps)), default=-1)

    def last(self, num_steps: int) -> Window:
        """The same window, cut to its last steps."""
        return self.between(self.last_step - num_steps + 1, self.last_step)

    def between(self, first: int, last: int) -> Window:
        """The same window, cut to the steps from `first` to `last`."""
        return Window(
            {name: _between(first, last, *column) for name, column in self.series.items()},
            {name: _between(first, last, *column) for name, column in self.scalars.items()},
            self.facts,
        )


def noted(measure: Callable[[Window], Measure]) -> Callable[[Window], Measure]:
    """A measure that is computed once for each window, however many rules use it."""

    key = f"{measure.__module__}.{measure.__qualname__}"

    @wraps(measure)
    def known(window: Window) -> Measure:
        if key not in window.notes:
            window.notes[key] = measure(window)
        found: Measure = window.notes[key]
        return found

    return known


def _between(first: int, last: int, steps: NDArray[np.int64], values: Array) -> Column:
    inside = slice(int(np.searchsorted(steps, first)), int(np.searchsorted(steps, last, side="right")))
    return steps[inside], values[inside]


def _grid(columns: list[tuple[str, NDArray[np.int64], Array]]) -> Grid:
    if not columns:
        return Grid((), np.empty(0, np.int64), np.empty((0, 0)))
    # Most series share the same array of steps: the union is then that array.
    first = columns[0][1]
    shared = all(steps is first or np.array_equal(steps, first) for _, steps, _ in columns)
    steps = first if shared else np.unique(np.concatenate([steps for _, steps, _ in columns]))
    values = np.full((len(columns), len(steps)), np.nan)
    for row, (_, own, column) in zip(values, columns, strict=True):
        row[slice(None) if shared else np.searchsorted(steps, own)] = column
    return Grid(tuple(site for site, _, _ in columns), steps, values)
