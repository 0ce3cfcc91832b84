"""Steps that take longer and longer. Only runs of some minutes are judged: short ones say more about the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

MIN_SECONDS: Final = 300.0
MIN_STEPS: Final = 400
SLOWER: Final = 1.5
PARTS: Final = 8


@rule(references=("PyTorch Performance Tuning Guide",))
def throughput_regression(window: Window) -> Iterator[Found]:
    """The second half of the run is much slower than the first."""
    steps, times = window.get("clock")
    if len(steps) < MIN_STEPS or times[-1] - times[0] < MIN_SECONDS:
        return
    took = np.diff(times) / np.maximum(np.diff(steps), 1)
    levels = np.array([np.median(part) for part in np.array_split(took, PARTS)])
    before, after = levels[1 : PARTS // 2], levels[PARTS // 2 :]
    # Lasting: the fastest part of the later half against the slowest of the earlier. The first part is warm-up.
    if not before.max() > 0 or not after.min() > SLOWER * before.max():
        return
    place = int(np.argmax(levels[1:] > SLOWER * levels[1])) + 1
    step = int(steps[place * len(took) // PARTS])
    yield Found(
        f"a step takes {np.median(after):.2g} s, before step {step} it took {np.median(before):.2g} s",
        step=step,
        confidence=0.7,
        remedy="compare memory, temperature and input pipeline before and after: sonde show --at "
        f"{step}; lists that grow, a GPU that throttles, a full page cache",
        evidence=(Evidence("clock", float(np.median(after) / np.median(before)), "about 1", step, "slower by"),),
    )
