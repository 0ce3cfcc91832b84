"""A training step with and without a recorder: the arms take turns in short blocks, in one process."""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT, make_step
from tensorboard_bins import default_bins

import sonde
from hooks import OwnHooks
from report import interval
from sonde.config import Settings
from sonde.session import begin

MODELS: dict[str, dict[str, Any]] = {
    "0.9 B": {"layers": 16, "width": 2048, "heads": 16},
    "124 M": {"layers": 12, "width": 768, "heads": 12},
}
OPTIMIZER_SIDE: dict[str, Any] = {"activations": False, "inspect": False}
SONDE_ARMS: dict[str, dict[str, Any]] = {
    "gradients": {**OPTIMIZER_SIDE, "params": False, "updates": False, "optim": False},
    "gradients, parameters, moments": {**OPTIMIZER_SIDE, "updates": False},
    "all optimizer-side": OPTIMIZER_SIDE,
    "all optimizer-side + activations": {"activations": sonde.every(1), "inspect": False},
}
SLOW = "TensorBoard's algorithm"
FINITE_ARM = "check_finite=True, nothing else"


class Nothing:
    """No recorder: the step alone."""

    def after_step(self) -> None: ...
    def stop(self) -> None: ...


class Recorded:
    """Sonde, with the given keywords."""

    def __init__(self, model: nn.Module, optimizer: Any, folder: str, **options: Any) -> None:
        settings = options.pop("settings", {})
        self.session: Any = begin(
            Settings.load(
                project="speed", dir=folder, verbose=False, system_metrics=False, **{"check_finite": False, **settings}
            )
        )
        self.session.watch(model, optimizer, **options)

    def after_step(self) -> None: ...

    def stop(self) -> None:
        assert self.session.recording.breaker.num_errors == 0, "sonde failed: see above"
        self.session.finish()


class NaiveLoop:
    """Nine numbers per weight and gradient, one `.item()` each."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def after_step(self) -> None:
        for p in self.model.parameters():
            for x in (p.detach(), p.grad):
                if x is not None:
                    self.nine(x)

    @staticmethod
    def nine(x: Tensor) -> None:
        for number in (x.mean(), x.std(), x.norm(), x.abs().mean(), x.min(), x.max()):
            number.item()
        (x == 0).float().mean().item()
        torch.isnan(x).sum().item()
        torch.isinf(x).sum().item()

    def stop(self) -> None: ...


class WandbAlgorithm(NaiveLoop):
    """The computation of `wandb.watch(log="all", log_freq=1)` for each tensor: a histogram between its extremes."""

    @staticmethod
    def nine(x: Tensor) -> None:
        x = x.reshape(-1)
        if (~torch.isfinite(x)).all().item() or not torch.isfinite(x).all().item():
            return
        low, high = x.min().item(), x.max().item()
        x.histc(bins=64, min=low, max=high).cpu()
        torch.linspace(low, high, steps=65)


class TensorBoardAlgorithm(NaiveLoop):
    """The computation of `add_histogram` for each tensor: on the host, with numpy."""

    @staticmethod
    def nine(x: Tensor) -> None:

        values = x.detach().cpu().numpy().reshape(-1).astype(float)
        np.histogram(values, bins=default_bins())
        values.dot(values)


OTHERS: dict[str, Callable[[nn.Module], Any]] = {
    "naive loop": NaiveLoop,
    "wandb.watch's algorithm": WandbAlgorithm,
    SLOW: TensorBoardAlgorithm,
}
_ROUNDS_OF_OTHERS = {"naive loop": 4, "wandb.watch's algorithm": 4, SLOW: 1}
"""Few rounds: these cost many times more than the variation between rounds."""
_WARM_UP = 20
"""Past the first histograms: compiling a kernel takes longer than a round."""


@dataclass(slots=True)
class Lane:
    """One arm: its recorder, its hooks, its times."""

    name: str
    recorder: Any
    hooks: OwnHooks
    laps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    peak_gib: float = 0.0

    def times_ms(self, block: int) -> list[float]:
        return [start.elapsed_time(end) / block for start, end in self.laps]


def trained(name: str, compiled: bool | str) -> tuple[nn.Module, Any, Callable[[], Tensor]]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = GPT(**MODELS[name]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    called: Any = model
    if compiled:
        called = torch.compile(model, mode=compiled if isinstance(compiled, str) else None)
    step: Any = make_step(called, optimizer)
    for _ in range(4):
        step()
    return model, optimizer, step


def end_to_end(name: str, compiled: bool, rounds: int, block: int, arms: list[str]) -> dict[str, Any]:
    """Time blocks of steps by the device's clock, with the arms in a different order each round and no waits."""
    model, optimizer, step = trained(name, compiled)
    folder = tempfile.mkdtemp(prefix="sonde-gpu-")
    return compare(step, {arm: partial(_recorder, arm, model, optimizer, folder) for arm in arms}, rounds, block)


def compare(step: Callable[[], Any], arms: dict[str, Callable[[], Any]], rounds: int, block: int) -> dict[str, Any]:
    """The same for any step: each arm comes with the function that attaches its recorder."""
    lanes = []
    for arm, attach in {"off": Nothing, "off again": Nothing, **arms}.items():
        hooks = OwnHooks()
        with hooks.in_place():
            lanes.append(Lane(arm, attach(), hooks))
    for lane in lanes:
        _run(lane, step, _WARM_UP if lane.name not in OTHERS else 0)
    for number in range(rounds):
        order = [lane for lane in lanes if number < _ROUNDS_OF_OTHERS.get(lane.name, rounds)]
        random.Random(number).shuffle(order)
        for lane in order:
            _lap(lane, step, block if lane.name != SLOW else 1)
    torch.cuda.synchronize()
    for lane in lanes:
        with lane.hooks.in_place():
            lane.recorder.stop()
    return _conclude(lanes, block)


def _lap(lane: Lane, step: Callable[[], Tensor], block: int) -> None:
    _run(lane, step, 1)  # clear what the previous lane left in the caches and in the queue
    torch.cuda.reset_peak_memory_stats()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    _run(lane, step, block)
    end.record()
    lane.laps.append((start, end))
    lane.peak_gib = torch.cuda.max_memory_allocated() / 2**30


def _conclude(lanes: list[Lane], block: int) -> dict[str, Any]:
    """Compare each round with the two lanes of that round that do nothing; the second of them with the first."""
    base, again = (lane.times_ms(block) for lane in lanes[:2])
    result: dict[str, Any] = {"step_ms": statistics.median(base), "rounds": len(base), "arms": {}}
    for place, lane in enumerate(lanes):
        against = base if place < 2 else [(a + b) / 2 for a, b in zip(base, again, strict=True)]
        times = lane.times_ms(block if lane.name != SLOW else 1)
        ratios = [time / other for time, other in zip(times, against, strict=False)]
        median, (low, high) = interval(ratios)
        result["arms"][lane.name] = {
            "ratio": median,
            "low": low,
            "high": high,
            "peak_gib": lane.peak_gib,
            "peak_growth": lane.peak_gib / lanes[0].peak_gib - 1,
        }
    return result


def _recorder(arm: str, model: nn.Module, optimizer: Any, folder: str) -> Any:
    if arm in SONDE_ARMS:
        return Recorded(model, optimizer, folder, budget=None, **SONDE_ARMS[arm])
    if arm == FINITE_ARM:
        options = {**SONDE_ARMS["gradients"], "grads": False, "settings": {"check_finite": True}}
        return Recorded(model, optimizer, folder, budget=None, **options)
    return OTHERS[arm](model) if arm in OTHERS else Nothing()


def _run(lane: Lane, step: Callable[[], Tensor], num: int) -> None:
    with lane.hooks.in_place():
        for _ in range(num):
            step()
            lane.recorder.after_step()


def print_table(title: str, result: dict[str, Any]) -> None:
    print(f"{title}: {result['step_ms']:.1f} ms per step")
    for arm, row in result["arms"].items():
        spread = f"({row['low']:.4f} to {row['high']:.4f})"
        print(f"  {arm:40s} {row['ratio']:.4f} {spread}  peak {row['peak_growth']:+.2%}", flush=True)


if __name__ == "__main__":
    compiled = "--compiled" in sys.argv
    some = end_to_end("0.9 B", compiled, 24, 4, list(SONDE_ARMS))
    print_table("0.9 B", some)
