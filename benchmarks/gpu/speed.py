"""On a GPU: the fused sketch against the speed of memory, and a training step with and without sonde.

    PYTHONPATH=src:vendor python benchmarks/gpu/speed.py [--out results.json]

Ratios are of one run: the read limit is measured with a kernel that only adds up, and arms take turns in short blocks.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT, make_step

import sonde
from sonde.config import Settings
from sonde.reduce.triton import ChunkList
from sonde.session import begin

SHAPES = [(50304, 2048)] + [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)] * 16


@triton.jit
def read(values, out, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # noqa: N803
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    start = values + tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    for i in tl.range(0, BLOCKS):
        total += tl.load(start + i * BLOCK + lanes)
    tl.store(out + tl.program_id(0), tl.sum(total))


def milliseconds(work: Callable[[], Any], repeats: int = 30) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(4_000_000)  # the device is busy while the launches are queued, as it is in training
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def read_limit(numel: int) -> float:
    """The best time in which anything here reads that many float32."""
    values = torch.randn(numel, device="cuda")
    best = float("inf")
    for block, blocks, warps in ((1024, 16, 4), (1024, 32, 8), (2048, 16, 8), (2048, 32, 8), (4096, 8, 8)):
        grid = numel // (block * blocks)
        out = torch.empty(grid, device="cuda")
        launch = functools.partial(read[(grid,)], values, out, block, blocks, num_warps=warps)
        best = min(best, milliseconds(launch))
    return best


def kernels() -> dict[str, Any]:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    limit = read_limit(numel)
    result: dict[str, Any] = {"tensors": len(SHAPES), "elements": numel, "read_limit_ms": limit}
    result["read_limit_TB_s"] = numel * 4 / limit / 1e9
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]
        chunks = ChunkList([t.numel() for t in tensors], dtype, torch.device("cuda", 0))
        took = milliseconds(functools.partial(chunks.rows, tensors))
        share = limit * dtype.itemsize / 4 / took
        result[str(dtype).removeprefix("torch.")] = {"ms": took, "of_the_limit": share}
    return result


ARMS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "off again": None,
    "gradients": {"params": False, "updates": False, "optim": False, "activations": False},
    "gradients, parameters, moments": {"updates": False, "activations": False},
    "gradients, parameters, moments, updates": {"activations": False},
    "gradients and activations": {"params": False, "updates": False, "optim": False, "activations": sonde.every(1)},
}


def end_to_end(compiled: bool, rounds: int, block: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step: Any = make_step(torch.compile(model) if compiled else model, optimizer)
    folder = tempfile.mkdtemp(prefix="sonde-gpu-")
    for _ in range(3):
        step()
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    memory: dict[str, float] = {}
    for _ in range(rounds):
        order = list(ARMS)
        random.Random(len(times["off"])).shuffle(order)
        for arm in order:
            options = ARMS[arm]
            session: Any = None
            if options is not None:
                session = begin(Settings.load(project="speed", dir=folder, verbose=False))
                session.watch(model, optimizer, **options)
            for _ in range(2):  # plans, buffers, kernels
                step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for _ in range(block):
                step()
            torch.cuda.synchronize()
            times[arm].append((time.perf_counter() - start) / block)
            memory[arm] = torch.cuda.max_memory_allocated() / 2**30
            if session is not None:
                assert session.breaker.num_errors == 0, "sonde failed: see above"
                session.finish()
    ratios = {
        arm: statistics.median(t / b for t, b in zip(values, times["off"], strict=True))
        for arm, values in times.items()
    }
    return {"step_ms": statistics.median(times["off"]) * 1e3, "ratio": ratios, "peak_gib": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=8)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "kernels": kernels(),
    }
    print(json.dumps(result, indent=1), flush=True)
    for name, compiled in (("eager", False), ("compiled", True)):
        result[name] = end_to_end(compiled, options.rounds, options.block)
        print(name, json.dumps(result[name], indent=1), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
