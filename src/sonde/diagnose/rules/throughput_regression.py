"""Steps take longer and longer. Only checked in runs of several minutes: shorter ones say more about the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
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
    # Compare the fastest part of the second half with the slowest of the first; the first part is warm-up.
    if not before.max() > 0 or not after.min() > SLOWER * before.max():
        return
    place = int(np.argmax(levels[1:] > SLOWER * levels[1])) + 1
    step = int(steps[place * len(took) // PARTS])
    yield Found(
        f"Steps have become slower since step {step:,}: {number(float(np.median(after)))} s per step, compared with "
        f"{number(float(np.median(before)))} s before.",
        step=step,
        confidence=0.7,
        remedy=f"Compare memory, temperature and input pipeline before and after with `sonde show --at {step}`. "
        "Look for growing lists, a throttled GPU or a full page cache.",
        evidence=(
            Evidence("clock", float(np.median(after) / np.median(before)), "about 1", step, "time per step / before"),
        ),
    )
