"""The last rows of some series, by site: what a rule sees. Pure data; a window never reads a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.schema.names import Series, matches, split_pattern
from sonde.schema.sketch import Array


@dataclass(frozen=True, slots=True)
class Window:
    """Series with their own steps, scalars likewise, and what is known of the run.

    >>> steps = np.arange(3)
    >>> window = Window({Series("grad", "0.weight", "rms"): (steps, np.ones(3))})
    >>> [site for site, _, values in window.by_site("grad/*/rms")]
    ['0.weight']
    """

    series: Mapping[Series, tuple[NDArray[np.int64], Array]] = field(default_factory=dict)
    scalars: Mapping[str, tuple[NDArray[np.int64], Array]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def by_site(self, pattern: str) -> Iterator[tuple[str, NDArray[np.int64], Array]]:
        """(site, steps, values) of every series a pattern names, in order of sites."""
        wanted = split_pattern(pattern)
        for name in sorted(self.series):
            if all(matches(glob, part) for glob, part in zip(wanted, name, strict=True)):
                steps, values = self.series[name]
                yield name.site, steps, values

    def last(self, num_steps: int) -> Window:
        """The same window, cut to its last steps."""
        newest = max(
            (int(steps[-1]) for steps, _ in [*self.series.values(), *self.scalars.values()] if len(steps)), default=0
        )
        first = newest - num_steps + 1
        return Window(
            {name: _from(first, *column) for name, column in self.series.items()},
            {name: _from(first, *column) for name, column in self.scalars.items()},
            self.facts,
        )


def _from(first: int, steps: NDArray[np.int64], values: Array) -> tuple[NDArray[np.int64], Array]:
    start = int(np.searchsorted(steps, first))
    return steps[start:], values[start:]
