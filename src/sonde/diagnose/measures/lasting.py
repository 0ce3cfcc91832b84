"""What held to the end: the level of an inspected number over the later half of a run, and since when it was bad."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.diagnose.measures.progress import onset
from sonde.schema.window import Window


@dataclass(frozen=True, slots=True)
class Lasting:
    """A site whose number was beyond a limit until the end."""

    site: str
    level: float
    """Median over the later half."""
    since: int
    last: float


def lasting(window: Window, pattern: str, limit: float, *, min_seen: int = 8) -> list[Lasting]:
    """Sites whose number lay above `limit` through the later half and at the end, in the order of the forward pass."""
    found = []
    for site, steps, values in window.by_site(pattern):
        known = np.isfinite(values)
        steps, values = steps[known], values[known]
        if len(values) < min_seen:
            continue
        late = values[len(values) // 2 :]
        since = onset(steps, values > limit)
        # A condition that came at the very end has not lasted.
        if (
            np.median(late) > limit
            and np.median(values[-3:]) > limit
            and since <= steps[0] + 0.6 * (steps[-1] - steps[0])
        ):
            found.append(Lasting(site, float(np.median(late)), since, float(values[-1])))
    return found
