"""A table of values by site and step in bounded memory: the first steps, the newest steps and a thinned middle."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array
from sonde.schema.window import Column

EARLY: Final = 128
"""Number of first steps that are all kept: many faults show only there."""
LATE: Final = 256
"""Number of newest steps that are all kept."""
CAPACITY: Final = 1024
"""Maximum number of steps; beyond it, the middle is thinned to every second, fourth, eighth … step."""

_ROOM: Final = (CAPACITY - EARLY - LATE) // 2
"""Minimum number of free columns after thinning."""

Key = TypeVar("Key", bound=Hashable)
Steps = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Block(Generic[Key]):
    """A table of rows by key and columns by step, with holes.

    >>> block = Block[str]()
    >>> block.put(np.array([0, 1]), ("loss",), np.array([[3.0], [2.0]]), None)
    >>> [(name, values.tolist()) for name, (steps, values) in block.columns()]
    [('loss', [3.0, 2.0])]
    """

    def __init__(self) -> None:
        self._row_of: dict[Key, int] = {}
        self._steps: Steps = np.empty(0, np.int64)
        self._num_columns = 0
        self._values: Array = np.empty((0, 0))
        self._seen: Flags = np.empty((0, 0), np.bool_)
        self._stride = 1

    def put(self, steps: Steps, keys: Sequence[Key], values: Array, seen: Flags | None) -> None:
        """Add values of shape (steps, keys); `seen` is false where a value is missing. Known steps are filled in."""
        rows = np.array([self._row_of.setdefault(key, len(self._row_of)) for key in keys], np.intp)
        if not (steps[1:] > steps[:-1]).all():  # sort, and keep the last value of each step
            unique, last = np.unique(steps[::-1], return_index=True)
            order = len(steps) - 1 - last
            steps, values, seen = unique, values[order], None if seen is None else seen[order]
        for start in range(0, len(steps), _ROOM):
            part = slice(start, start + _ROOM)
            self._put(steps[part], rows, values[part], None if seen is None else seen[part])

    def _put(self, steps: Steps, rows: NDArray[np.intp], values: Array, seen: Flags | None) -> None:
        columns = self._columns_for(steps)
        place = (rows[:, None], columns[None, :])
        if seen is None:
            self._values[place], self._seen[place] = values.T, True
        else:
            self._values[place] = np.where(seen.T, values.T, self._values[place])
            self._seen[place] |= seen.T

    def forget(self, step: int) -> None:
        """Drop this step and all later ones, because training has returned to it."""
        known = self._steps[: self._num_columns]
        self._select(np.flatnonzero(known < step))

    def columns(self) -> Iterator[tuple[Key, Column]]:
        """Yield the steps and values of every non-empty row; rows without holes share one array of steps."""
        steps = self._steps[: self._num_columns].copy()
        for key, row in self._row_of.items():
            seen = self._seen[row, : self._num_columns]
            if seen.all():
                yield key, (steps, self._values[row, : self._num_columns].copy())
            elif seen.any():
                yield key, (steps[seen], self._values[row, : self._num_columns][seen])

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes + self._seen.nbytes + self._steps.nbytes

    def _columns_for(self, steps: Steps) -> NDArray[np.intp]:
        """The columns of these steps; new steps get new columns."""
        if self._num_columns + len(steps) > CAPACITY:
            self._thin()
        known = self._steps[: self._num_columns]
        new = np.setdiff1d(steps, known, assume_unique=True)
        self._reserve(self._num_columns + len(new))
        self._steps[self._num_columns : self._num_columns + len(new)] = new
        is_in_order = not len(new) or not len(known) or new[0] > known[-1]
        self._num_columns += len(new)
        if not is_in_order:
            self._select(np.argsort(self._steps[: self._num_columns], kind="stable"))
        return np.searchsorted(self._steps[: self._num_columns], steps)

    def _thin(self) -> None:
        """Keep every `stride`-th step of the middle, with a stride large enough to drop at least half of them."""
        steps = self._steps[: self._num_columns]
        inner = np.arange(self._num_columns)
        is_middle = (inner >= EARLY) & (inner < self._num_columns - LATE)
        while (is_middle & (steps % self._stride == 0)).sum() > _ROOM:
            self._stride *= 2
        self._select(np.flatnonzero(~is_middle | (steps % self._stride == 0)))

    def _select(self, columns: NDArray[np.intp]) -> None:
        count = len(columns)
        for table in (self._values, self._seen):
            table[:, :count] = table[:, columns]
        self._seen[:, count:] = False
        self._steps[:count] = self._steps[columns]
        self._num_columns = count

    def _reserve(self, num_columns: int) -> None:
        """Make room for all rows and `num_columns` columns, growing by doubling."""
        rows, columns = self._values.shape
        if rows >= len(self._row_of) and columns >= num_columns:
            return
        rows = rows if rows >= len(self._row_of) else max(len(self._row_of), 2 * rows if rows else 0)
        columns = columns if columns >= num_columns else max(num_columns, min(2 * columns, CAPACITY), 64)
        values, seen, steps = np.full((rows, columns), np.nan), np.zeros((rows, columns), np.bool_), self._steps
        used = slice(0, self._num_columns)
        values[: len(self._values), used] = self._values[:, used]
        seen[: len(self._seen), used] = self._seen[:, used]
        self._values, self._seen = values, seen
        self._steps = np.zeros(columns, np.int64)
        self._steps[used] = steps[used]
