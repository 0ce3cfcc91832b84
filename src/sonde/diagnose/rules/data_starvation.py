"""The GPU is idle most of the time because the CPU is busy preparing data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

MIN_SECONDS: Final = 120.0
IDLE: Final = 40.0
BUSY: Final = 90.0
MIN_SAMPLES: Final = 10


@rule(references=("Mohan et al. 2021, Analyzing and mitigating data stalls in DNN training",))
def data_starvation(window: Window) -> Iterator[Found]:
    """The GPU is mostly idle while the process is busy: data arrive too slowly."""
    _, times = window.get("clock")
    steps, busy = window.get("system/process_cpu_percent")
    names = [name for name in window.scalars if name.startswith("system/gpu") and name.endswith("_percent")]
    names = [name for name in names if "memory" not in name]
    if len(times) < 2 or times[-1] - times[0] < MIN_SECONDS or len(busy) < MIN_SAMPLES or not names:
        return
    idle = min(names, key=lambda name: float(np.median(window.scalars[name][1])))
    use = float(np.median(window.scalars[idle][1]))
    # An idle process is waiting for something else: a debugger, another rank, a disk.
    if use > IDLE or float(np.median(busy)) < BUSY:
        return
    yield Found(
        f"The GPU is only {use:.0f} % busy, while the process keeps {np.median(busy) / 100:.1f} CPU cores busy.",
        step=int(steps[0]),
        confidence=0.6,
        remedy="Load data in parallel: `DataLoader(..., num_workers=4, pin_memory=True, persistent_workers=True)`, "
        "and decode less per sample.",
        evidence=(
            Evidence(idle, use, "above 80", meaning="GPU utilisation in %"),
            Evidence("system/process_cpu_percent", float(np.median(busy)), "below 90", meaning="CPU utilisation in %"),
        ),
        severity="info",
    )
