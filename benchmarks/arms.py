"""The recorders that the benchmark compares, each with its own copy of a model and its own folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Recording(Protocol):
    """The calls of an arm around a training step. `settle` waits until all work the arm has started is done."""

    def after_step(self, step: int, loss: Tensor) -> None: ...
    def settle(self) -> None: ...
    def stop(self) -> None: ...


Start = Callable[[nn.Module, Optimizer, Path], Recording]


@dataclass(frozen=True, slots=True)
class Arm:
    """One recorder, and the number of steps it needs to reach its steady state."""

    name: str
    what: str
    start: Start
    warmup_steps: int = 10
    is_restless: bool = False
    """Has threads that keep working between its blocks, at the cost of the arm measured then."""


class Nothing:
    """No recorder: the training step alone."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None: ...
    def after_step(self, step: int, loss: Tensor) -> None: ...
    def settle(self) -> None: ...
    def stop(self) -> None: ...


class Sonde:
    """`sonde.init` and `session.watch` with the given keywords."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path, **keywords: Any) -> None:
        from sonde.config import Settings
        from sonde.session import begin

        settings = keywords.pop("settings", {})
        self.session = begin(Settings.load(project="overhead", dir=folder, verbose=False, **settings))
        self.session.watch(model, optimizer, **keywords)

    def after_step(self, step: int, loss: Tensor) -> None:
        self.session.log({"loss": loss})

    def settle(self) -> None:
        self.session.flush(30.0)

    def stop(self) -> None:
        self.session.finish()


class Wandb:
    """`wandb.watch` of everything at every step, offline."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        # Nothing may leave the machine, and nothing may be printed between the lines of the benchmark.
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
        import wandb

        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True)
        self.run = wandb.init(project="overhead", dir=str(folder), mode="offline", settings=settings)
        self.run.watch(model, log="all", log_freq=1)

    def after_step(self, step: int, loss: Tensor) -> None:
        self.run.log({"loss": loss.item()})

    def settle(self) -> None: ...

    def stop(self) -> None:
        self.run.unwatch()
        self.run.finish()


class NaiveLoop:
    """Nine numbers per weight and gradient, one `.item()` each: what you would write on the first afternoon."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        self.model = model
        self.file = (folder / "stats.jsonl").open("w")

    def after_step(self, step: int, loss: Tensor) -> None:
        row: dict[str, Any] = {"step": step, "loss": loss.item()}
        for name, p in self.model.named_parameters():
            row[f"param/{name}"] = self.nine(p.detach())
            if p.grad is not None:
                row[f"grad/{name}"] = self.nine(p.grad)
        self.file.write(json.dumps(row) + "\n")

    def nine(self, x: Tensor) -> list[float]:
        return [
            x.mean().item(),
            x.std().item() if x.numel() > 1 else 0.0,
            x.norm().item(),
            x.abs().mean().item(),
            x.min().item(),
            x.max().item(),
            (x == 0).float().mean().item(),
            torch.isnan(x).sum().item(),
            torch.isinf(x).sum().item(),
        ]

    def settle(self) -> None:
        self.file.flush()

    def stop(self) -> None:
        self.file.close()


class TensorBoard:
    """Histograms of every weight and gradient at every step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.model, self.writer = model, SummaryWriter(str(folder))

    def after_step(self, step: int, loss: Tensor) -> None:
        self.writer.add_scalar("loss", loss.item(), step)
        for name, p in self.model.named_parameters():
            self.writer.add_histogram(f"param/{name}", p.detach(), step)
            if p.grad is not None:
                self.writer.add_histogram(f"grad/{name}", p.grad, step)

    def settle(self) -> None:
        self.writer.flush()

    def stop(self) -> None:
        self.writer.close()


STATISTICS: dict[str, Any] = {"check_finite": False, "live_rules": False}
"""Statistics only, like the other arms; "sonde default" also checks values and runs the rules."""


def sonde_with(**keywords: Any) -> Start:
    return lambda model, optimizer, folder: Sonde(model, optimizer, folder, **keywords)


def all_arms() -> list[Arm]:
    """All arms, the base first; "base again" shows how much identical arms differ on this machine."""
    from sonde import every

    return [
        Arm("base", "the training step alone", Nothing),
        Arm("base again", "the same again: the A/A control", Nothing),
        Arm(
            "sonde w+g+u",
            "weights, gradients and updates at every step",
            sonde_with(activations=False, optim=False, inspect=False, budget=None, settings=STATISTICS),
        ),
        Arm(
            "sonde w+g+u+a",
            "the same and activations at every step",
            sonde_with(activations=every(1), optim=False, inspect=False, budget=None, settings=STATISTICS),
        ),
        # By default activations are recorded at each of the first 100 steps; the rest is the longer part of a run.
        Arm("sonde default", "`sonde.watch(model, optimizer)` after its first 100 steps", sonde_with(), 110),
        Arm("wandb.watch", '`wandb.watch(log="all", log_freq=1)`, offline', Wandb, is_restless=True),
        Arm("naive loop", "nine numbers per weight and gradient by `.item()`", NaiveLoop),
        Arm("TensorBoard", "histograms of every weight and gradient at every step", TensorBoard, is_restless=True),
    ]
