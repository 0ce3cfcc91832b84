"""The graphs of past steps stay alive, or memory grows with every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, since
from sonde.schema.sketch import Array
from sonde.schema.window import Window

KEPT: Final = 0.6
PARTS: Final = 4
GROWTH: Final = 0.03
"""Minimum growth relative to the start of the steady part, and at least MIN_MB; less may be caches filling up."""
MIN_MB: Final = 10.0
MIN_INSPECTIONS: Final = 16
REMEDY: Final = (
    "Keep numbers, not tensors with their graph: `total += loss.item()` instead of `total += loss`, and "
    "`outputs.append(output.detach().cpu())` for the last few steps only."
)


@rule(causes=("out_of_memory", "killed"), references=("PyTorch FAQ: My model reports 'out of memory'",))
def memory_leak(window: Window) -> Iterator[Found]:
    """Something keeps memory from every step alive."""
    for site, steps, alive in window.by_site("model/*/alive"):
        of_steps, of = window.get(f"model/{site}/alive_of")
        _, mine, theirs = np.intersect1d(steps, of_steps, return_indices=True)
        share = alive[mine] / np.maximum(of[theirs], 1)
        is_kept = (share > KEPT) & (of[theirs] >= 3)
        if len(share) >= 5 and is_kept.sum() >= 3 and is_kept[-3:].all():
            yield _graphs(site, onset(steps[mine], is_kept), float(alive[-1]), float(of[-1]))
            return
    for name in ("rss_mb", "gpu_mb"):
        for site, steps, size in window.by_site(f"model/*/{name}"):
            if _grows(steps, size):
                yield _growth(f"model/{site}/{name}", steps, size)
                return


def _graphs(site: str, step: int, alive: float, of: float) -> Found:
    return Found(
        f"The graphs of past steps have stayed alive {since(step)} ({alive:.0f} of the last {of:.0f} checked): "
        "something keeps losses or outputs together with their graph.",
        step=step,
        confidence=0.95,
        remedy=REMEDY,
        evidence=(Evidence(f"model/{site}/alive", alive, "0", meaning="graphs that are still alive"),),
    )


def _grows(steps: NDArray[np.int64], size: Array) -> bool:
    """Whether memory grew steadily over the last three quarters of the run, and by more than caches would."""
    steady = (steps >= steps[-1] // 4) & np.isfinite(size) if len(steps) else np.empty(0, bool)
    if steady.sum() < MIN_INSPECTIONS:
        return False
    x, y = steps[steady].astype(float), size[steady]
    edges = np.linspace(x[0], x[-1], PARTS + 1)[1:-1]
    levels = np.array([np.median(part) if len(part) else np.nan for part in np.split(y, np.searchsorted(x, edges))])
    rises = np.diff(levels)
    # Memory allocated in a few large blocks grows in jumps: only even growth comes from every step.
    is_even = rises.min() > 0.4 * rises.max() if (rises > 0).all() else False
    return bool(is_even and levels[-1] - levels[0] > max(GROWTH * levels[0], MIN_MB))


def _growth(name: str, steps: NDArray[np.int64], size: Array) -> Found:
    per_step = float(size[-1] - size[0]) / max(float(steps[-1] - steps[0]), 1.0)
    return Found(
        f"Memory grows steadily by {number(per_step)} MB per step, from {size[0]:,.0f} MB to {size[-1]:,.0f} MB.",
        step=int(steps[0]),
        confidence=0.75,
        remedy=REMEDY,
        evidence=(Evidence(name, float(size[-1]), f"about {size[0]:,.0f}", meaning="memory in MB"),),
    )
