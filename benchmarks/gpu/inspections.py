"""Check on a GPU: inspections of data never wait for it and agree with the CPU; measure their cost on the host.

    PYTHONPATH=src python benchmarks/gpu/inspections.py

Needs torch and numpy. Prints one line per check; exits 1 if one fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from sonde.reduce.inspect.baseline import Baseline
from sonde.reduce.inspect.data import inspect_input, inspect_target, shift
from sonde.reduce.inspect.identity import batch_hash, ids_hash, label_purity
from sonde.reduce.inspect.loss_call import inspect_loss


def numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {"": float(found)}
    flat = {}
    for name, value in found.items():
        flat |= {f"{name}/{inner}": number for inner, number in numbers(value).items()}
    return flat


def loss(name: str, out: torch.Tensor, y: torch.Tensor) -> Any:
    return inspect_loss(name, out, y, getattr(F, name)(out, y), "mean", -100, Baseline())


def cases() -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (16, 129))
    image, labels = torch.randn(128, 3, 64, 64), torch.randint(0, 100, (128,))
    return {
        "input, table": (inspect_input, [torch.randn(64, 30)]),
        "input, images": (inspect_input, [image]),
        "input, images in bfloat16, channels last": (
            inspect_input,
            [image.bfloat16().to(memory_format=torch.channels_last)],
        ),
        "input, tokens": (inspect_input, [tokens]),
        "target, classes": (inspect_target, [labels]),
        "target, numbers": (inspect_target, [torch.randn(64, 3)]),
        "shift": (shift, [tokens[:, :-1], tokens[:, 1:].reshape(-1)]),
        "cross entropy": (lambda o, y: loss("cross_entropy", o, y), [torch.randn(128, 100), labels]),
        "cross entropy, vocabulary": (
            lambda o, y: loss("cross_entropy", o, y),
            [torch.randn(2048, 50_000), torch.randint(0, 50_000, (2048,))],
        ),
        "cross entropy, pictures": (
            lambda o, y: loss("cross_entropy", o, y),
            [torch.randn(8, 21, 64, 64), torch.randint(0, 21, (8, 64, 64))],
        ),
        "squares": (lambda o, y: loss("mse_loss", o, y), [torch.randn(64, 3), torch.randn(64, 3)]),
        "purity": (label_purity, [labels]),
    }


def without_waiting(call: Callable[[], Any]) -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(name: str, function: Callable[..., Any], tensors: list[torch.Tensor]) -> bool:
    on_gpu = [tensor.cuda() for tensor in tensors]
    function(*on_gpu)  # tables of weights are created once
    torch.cuda.synchronize()
    found = numbers(without_waiting(lambda: function(*on_gpu)))
    expected = numbers(function(*tensors))
    worst = max(abs(found[key] - expected[key]) / max(abs(expected[key]), 1e-3) for key in expected)
    start = time.perf_counter()
    for _ in range(20):
        function(*on_gpu)
    host_us = (time.perf_counter() - start) / 20 * 1e6
    torch.cuda.synchronize()
    is_right = found.keys() == expected.keys() and worst < 2e-3
    print(f"{'ok  ' if is_right else 'FAIL'} {name}: worst difference {worst:.1e}, {host_us:.0f} us of the host")
    return is_right


def check_identity() -> bool:
    batches = [(torch.randn(32, 64).cuda(), torch.randint(0, 10, (32,)).cuda()) for _ in range(2000)]
    batch_hash(batches[0])
    torch.cuda.synchronize()
    start = time.perf_counter()
    hashes = without_waiting(lambda: [batch_hash(batch) for batch in batches])
    host_us = (time.perf_counter() - start) / len(batches) * 1e6
    named = without_waiting(lambda: ids_hash(batches[0][1]))
    found = {int(number) for number in hashes}
    same = int(batch_hash([t.clone() for t in batches[7]])) == int(hashes[7])
    is_right = len(found) == 2000 and same and max(found) < 2**53 and int(named) < 2**53
    print(f"{'ok  ' if is_right else 'FAIL'} identity: {len(found)} of 2000 differ, {host_us:.0f} us of the host")
    return is_right


def main() -> int:
    with torch.no_grad():
        results = [check(name, *case) for name, case in cases().items()] + [check_identity()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
