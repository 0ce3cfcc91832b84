"""Count how often the training thread waits for the GPU in a profiler's trace, with sonde and without."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from training import Recorded, trained

import sonde
from hooks import OwnHooks

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaStreamWaitEvent")


def count(step: Any, num: int) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(num):
            step()
    found = {event.key: event.count for event in trace.key_averages()}
    return {name: found.get(name, 0) for name in WAITS}


def syncs(name: str = "124 M", steps: int = 4) -> dict[str, Any]:
    """The waits when recording everything at every step. Two are the profiler's own, at its start and end."""
    model, optimizer, step = trained(name, False)
    bare = count(step, steps)
    hooks = OwnHooks()
    with hooks.in_place():
        recorded = Recorded(
            model, optimizer, tempfile.mkdtemp(), budget=None, activations=sonde.every(1), inspect=False
        )
        for _ in range(3):
            step()
        watched = count(step, steps)
        recorded.stop()
    return {"steps": steps, "without": bare, "with": watched}


if __name__ == "__main__":
    print(syncs())
