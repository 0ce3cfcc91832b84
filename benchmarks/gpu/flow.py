"""The cost of a gradient flow analysis, in forward and backward passes of the same model on the same batch.

    PYTHONPATH=src:vendor python benchmarks/gpu/flow.py              # a GPT of 0.9 billion parameters
    PYTHONPATH=src python benchmarks/gpu/flow.py --device cpu        # a small one, to check that it runs

The claim is at most 1.25 for `FlowAnalyzer`. Arms take turns; the median of their ratios is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT

from sonde.flow import FlowAnalyzer, analyze


def seconds(function: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def once(model: nn.Module, tokens: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    model(tokens).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    torch.manual_seed(0)
    model = (GPT() if is_gpu else GPT(layers=2, width=128, heads=4, vocabulary=512)).to(options.device)
    tokens = torch.randint(0, 500, (8, 1024) if is_gpu else (2, 128), device=options.device)
    arms: dict[str, Callable[[], object]] = {
        "forward and backward": lambda: once(model, tokens),
        "FlowAnalyzer": lambda: FlowAnalyzer(model).analyze(tokens),
        "analyze": lambda: analyze(model, tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    with torch.autocast(options.device, torch.bfloat16):
        for turn in range(options.rounds + 2):
            for name, function in arms.items():
                took = seconds(function, options.device)
                if turn >= 2:  # the first turns warm up
                    times[name].append(took)
    base = times["forward and backward"]
    for name, taken in times.items():
        ratio = median(a / b for a, b in zip(taken, base, strict=True))
        print(f"{name:24} {1e3 * median(taken):9.1f} ms   x{ratio:.3f}")


if __name__ == "__main__":
    main()
