"""Check that a run keeps to its budget: 300 steps with `budget=0.01` against the steps before, between and after."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from training import Recorded, trained

import sonde
from hooks import OwnHooks


def timed(step: Any, num: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / num


def budget(name: str = "0.9 B", compiled: bool = False, steps: int = 300, block: int = 50) -> dict[str, Any]:
    model, optimizer, step = trained(name, compiled)
    folder = tempfile.mkdtemp(prefix="sonde-budget-")
    hooks = OwnHooks()
    settings = {"budget_seconds": 0, "check_finite": True}
    with hooks.in_place():
        recorded = Recorded(model, optimizer, folder, budget=0.01, activations=sonde.every(1), settings=settings)
        for _ in range(20):  # plans, kernels, the first review
            step()
        torch.cuda.synchronize()
        for _ in range(3):  # by then the earlier steps are accounted for
            step()
    for _ in range(5):  # the compiler recompiles the model when its hooks are gone
        step()
    governor = recorded.session.steps.training.governing.governor
    off, on, account = [timed(step, block)], [], (governor.lost_s, governor.total_s)
    for _ in range(steps // block):
        with hooks.in_place():
            on.append(timed(step, block))
        off.append(timed(step, block))
    with hooks.in_place():
        path, facts = recorded.session.path, recorded.session.steps.training.governing.facts()
        account = governor.lost_s - account[0], governor.total_s - account[1]
        recorded.stop()
    ratios = [t / ((a + b) / 2) for t, a, b in zip(on, off, off[1:], strict=False)]
    run = sonde.open(path)
    by_site: dict[str, list[int]] = {}
    table = run.stats("grad/*/norm").to_pylist()
    for row in table:
        by_site.setdefault(row["site"] if "site" in row else row["name"], []).append(row["step"])
    gaps = [max(b - a for a, b in pairwise(s)) for s in map(sorted, by_site.values())]
    events = [
        message for message in run.events().column("message").to_pylist() if "recording schedule changed" in message
    ]
    return {
        "step_ms": statistics.median(off) * 1e3,
        "ratio": statistics.median(ratios),
        "mean": sum(on) / len(on) / (sum(off) / len(off)),
        "ratios": ratios,
        "account": account[0] / (account[1] - account[0]),  # for these steps; the facts cover the whole run
        "facts": facts,
        "gradient_sites": len(by_site),
        "longest_gap": max(gaps),
        "events": events,
    }


if __name__ == "__main__":
    result = budget(compiled="--compiled" in sys.argv)
    for key, value in result.items():
        print(key, value)
