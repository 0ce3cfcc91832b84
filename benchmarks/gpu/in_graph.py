"""The effect of `activations="in-graph"` on a compiled model: time, memory, graphs, and the last bits of bfloat16."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT, make_step
from training import MODELS, Recorded

import sonde


def one(activations: Any, steps: int) -> dict[str, Any]:
    """Compile a model from scratch, watched or not."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    model = GPT(**MODELS["124 M"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = {"params": False, "updates": False, "optim": False, "inspect": False, "budget": None}
    recorded = None
    if activations is not None:
        recorded = Recorded(model, optimizer, tempfile.mkdtemp(), activations=activations, **options)
    step: Any = make_step(torch.compile(model, fullgraph=True), optimizer)
    losses = [step().detach() for _ in range(24)]  # past the first histograms, which compile their kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    took = (time.perf_counter() - start) / steps
    result = {
        "step_ms": took * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": [loss.item() for loss in losses],
        "graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": sum(counters["graph_break"].values()),
    }
    if recorded is not None:
        path = recorded.session.path
        recorded.stop()
        result["sites"] = len(set(sonde.open(path).stats("act/*/norm").column("site").to_pylist()))
    return result


def in_graph(steps: int = 100) -> dict[str, Any]:
    arms = {"off": None, "boundary": sonde.every(1), "in-graph": "in-graph", "off again": None}
    result = {arm: one(activations, steps) for arm, activations in arms.items()}
    base = result["off"]
    for arm in result.values():
        arm["ratio"] = arm["step_ms"] / base["step_ms"]
        arm["peak_growth"] = arm["peak_gib"] / base["peak_gib"] - 1
        arm["same_losses"] = arm["losses"] == base["losses"]
    return result


if __name__ == "__main__":
    print(in_graph())
