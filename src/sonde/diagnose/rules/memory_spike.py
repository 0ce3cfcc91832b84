"""Memory use jumps for a short time: the peak, not the average, decides whether the next run fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.measures.curves import held
from sonde.diagnose.measures.readings import reading
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, times
from sonde.schema.window import Window

JUMP: Final = 1.5
"""Memory relative to its usual level. Allocators and caches grow in smaller steps."""
MIN_MIB: Final = 256.0
"""Smaller jumps are those of a library that is loaded, or of a checkpoint."""
NEARLY_FULL: Final = 90.0
"""Percentage of the machine's memory from which the next such jump may end the run (LayerClaw warns at 90 %)."""
MIN_SEEN: Final = 4
PROCESS: Final = "system/process_rss_mib"
MACHINE: Final = "system/memory_percent"


@rule(severity="info", references=("LayerClaw: memory spikes",))
def memory_spike(window: Window) -> Iterator[Found]:
    """Memory use jumps far above its usual level and returns."""
    steps, size = window.get(PROCESS)
    known = np.isfinite(size) & (size > 0)
    steps, size = steps[known], size[known]
    if len(size) < MIN_SEEN:
        return
    usual, at = float(np.median(size)), int(np.argmax(size))
    later = size[at + 1 :]
    is_over = bool(len(later)) and bool(later.min() < usual * (1 + (JUMP - 1) / 2))
    if not size[at] > JUMP * usual or not size[at] - usual > MIN_MIB or not is_over or at == 0:
        return
    used = float(held(steps[at : at + 1], *window.get(MACHINE))[0])
    is_tight = used > NEARLY_FULL
    full = f", which filled {used:.0f} % of the machine's memory" if is_tight else ""
    yield Found(
        f"Memory of the process jumped to {times(float(size[at]) / usual)} its usual {usual:,.0f} MiB at step "
        f"{int(steps[at]):,} and fell again{full}.",
        step=int(steps[at]),
        last_step=int(steps[at]),
        severity="warning" if is_tight else None,
        confidence=0.7,
        evidence=[reading(window, PROCESS, int(steps[at]), f"below {number(JUMP * usual)}", "memory in MiB")],
        remedy="Look at what runs at this step: evaluation without `torch.no_grad()`, a checkpoint, a batch with an "
        "unusually long sequence. Process it in parts, or sort and cap the lengths.",
    )
