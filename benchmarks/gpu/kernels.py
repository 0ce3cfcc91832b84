"""The kernels alone: how close each comes to the fastest possible read of the same bytes."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonde.reduce.gpu.triton import CHUNK, ChunkList
from sonde.reduce.gpu.triton_single import Bank
from sonde.reduce.gpu.triton_step import StepChunks
from sonde.session.model.predicted_update import rule_of

SHAPES = [(50304, 2048)] + [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)] * 16
DEVICE = torch.device("cuda", 0)


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
        torch.cuda._sleep(8_000_000)  # the device is busy while the launches are queued, as it is in training
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def read_limit(numel: int) -> float:
    """The best time in which any kernel here reads `numel` float32."""
    values = torch.randn(numel, device=DEVICE)
    best = float("inf")
    for block, blocks, warps in ((1024, 16, 4), (1024, 32, 8), (2048, 16, 8), (2048, 32, 8), (4096, 8, 8)):
        grid = numel // (block * blocks)
        out = torch.empty(grid, device=DEVICE)
        launch = functools.partial(read[(grid,)], values, out, block, blocks, num_warps=warps)
        best = min(best, milliseconds(launch))
    return best


class Table:
    """Times, and the fraction of the limit that each reaches."""

    def __init__(self, numel: int) -> None:
        self.limit_ms = read_limit(numel)
        self.bytes_per_ms = numel * 4 / self.limit_ms
        self.rows: dict[str, Any] = {}

    def add(self, name: str, num_bytes: int, work: Callable[[], Any], repeats: int = 30) -> float:
        took = milliseconds(work, repeats)
        self.rows[name] = {"ms": took, "gb": num_bytes / 1e9, "of_the_limit": num_bytes / self.bytes_per_ms / took}
        print(f"{name:60s} {took:8.3f} ms  {self.rows[name]['of_the_limit']:6.1%} of the limit", flush=True)
        return took


def sketches(table: Table, dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in SHAPES]
    num_bytes = sum(t.numel() for t in tensors) * dtype.itemsize
    chunks = ChunkList([t.numel() for t in tensors], dtype, DEVICE)

    def with_samples() -> None:
        chunks.rows(tensors)
        chunks.samples(512, 7)

    name = str(dtype).removeprefix("torch.")
    table.add(f"sketch, {name}", num_bytes, functools.partial(chunks.rows, tensors))
    table.add(f"sketch with sampled histogram, {name}", num_bytes, with_samples)
    for share in (25, 1):  # like the gradients of words that hardly ever occur
        tensors[0].view(-1, CHUNK)[::share] *= 1e-20
        work = functools.partial(chunks.rows, tensors)
        table.add(f"sketch, 1 in {share} chunks of the first tensor too small to be squared, {name}", num_bytes, work)


def optimizer_of(name: str, params: list[Tensor]) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True)
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def step_passes(table: Table, name: str, dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE, dtype=dtype)) for shape in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = optimizer_of(name, list(params))
    optimizer.step()
    kernels = StepChunks([p.numel() for p in params], DEVICE, size=512)
    grads = [p.grad for p in params]
    rule = rule_of(optimizer, list(params))
    assert rule is not None
    num_bytes = sum(p.numel() for p in params) * dtype.itemsize * (3 if name == "SGD" else 4)
    work = functools.partial(kernels.rows, params, grads, rule, 3)
    table.add(f"optimizer pass, {name}, {str(dtype).removeprefix('torch.')}", num_bytes, work)


def activations(table: Table, dtype: torch.dtype) -> None:
    """As in a step: many of the same size, one launch each, and one launch for the rows of all."""
    tensors = [torch.randn(8192, 2048, device=DEVICE).to(dtype) for _ in range(32)]
    bank = Bank(DEVICE, 512)

    def work() -> None:
        for key, tensor in enumerate(tensors):
            bank.read(key, tensor)
        bank.rows()

    num_bytes = sum(t.numel() for t in tensors) * dtype.itemsize
    table.add(f"32 activations of 17 M, {str(dtype).removeprefix('torch.')}", num_bytes, work)


def naive(table: Table) -> None:
    tensors = [torch.randn(shape, device=DEVICE) for shape in SHAPES]

    def nine() -> None:
        for x in tensors:
            x.mean(), x.std(), x.norm(), x.abs().mean(), x.min(), x.max()
            (x == 0).sum(), torch.isnan(x).sum(), torch.isinf(x).sum()

    table.add("nine torch operations for each tensor, float32", sum(t.numel() for t in tensors) * 4, nine, 5)


def kernels() -> dict[str, Any]:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    table = Table(numel)
    print(f"read limit: {table.bytes_per_ms / 1e9:.2f} TB/s", flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        sketches(table, dtype)
        activations(table, dtype)
    step_passes(table, "AdamW", torch.float32)
    step_passes(table, "AdamW", torch.bfloat16)
    step_passes(table, "SGD", torch.float32)
    naive(table)
    return {
        "tensors": len(SHAPES),
        "elements": numel,
        "read_limit_ms": table.limit_ms,
        "read_limit_TB_s": table.bytes_per_ms / 1e9,
        "rows": table.rows,
    }


if __name__ == "__main__":
    kernels()
