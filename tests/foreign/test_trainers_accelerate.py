"""Accelerate: loops whose model, optimizer and loader were prepared, with sonde as a tracker."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from synthetic import clusters
from trial import Trial, Witnessed, trainer

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from sonde.adapters.accelerate import SondeTracker

STEPS = 40


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def loader(num_batches: int = STEPS) -> Any:
    x, y = (torch.cat(parts) for parts in zip(*islice(clusters(), num_batches), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)


class Prepared:
    """What a script has after `accelerator.prepare`, watched by sonde or by the oracle."""

    def __init__(self, trial: Trial, model: nn.Module, optimizers: list[Any], batches: Any, **given: Any) -> None:
        AcceleratorState._reset_state(True)  # of the training before, in the same process
        GradientState._reset_state()
        self.trial = trial
        tracker = None if isinstance(trial, Witnessed) else SondeTracker(**trial.options)
        self.accelerator = Accelerator(cpu=True, log_with=tracker, **given)
        self.model, *self.optimizers, self.loader = self.accelerator.prepare(model, *optimizers, batches)
        if isinstance(trial, Witnessed):
            trial.oracle.watch(self.model)
            for optimizer in self.optimizers:
                trial.oracle.follow(optimizer.optimizer)
        else:
            self.accelerator.init_trackers("zoo", config={"steps": STEPS})
            tracker.watch(self.model, [optimizer.optimizer for optimizer in self.optimizers])
        self.losses: list[float] = []

    def log(self, values: dict[str, Any], at: int) -> None:
        if isinstance(self.trial, Witnessed):
            self.trial.oracle.log(values, at)
        self.accelerator.log(values)
        self.losses += [float(value) for value in values.values()]

    def end(self) -> None:
        self.accelerator.end_training()
        self.trial.trained(self.model, [optimizer.optimizer for optimizer in self.optimizers], self.losses)


@trainer("Accelerate", is_quick=True)
def plain(trial: Trial) -> None:
    model = classifier()
    here = Prepared(trial, model, [torch.optim.AdamW(model.parameters(), lr=3e-3)], loader())
    (optimizer,) = here.optimizers
    for step, (x, y) in enumerate(here.loader):
        loss = functional.cross_entropy(here.model(x), y)
        here.accelerator.backward(loss)
        here.accelerator.clip_grad_norm_(here.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        here.log({"loss": loss.item()}, at=step)
    here.end()


@trainer("Accelerate, accumulation, last group incomplete")
def accumulation(trial: Trial) -> None:
    """`optimizer.step()` is called for every batch; Accelerate lets one in four through, and the last."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    here = Prepared(trial, model, [optimizer], loader(90), gradient_accumulation_steps=4)
    (optimizer,) = here.optimizers
    step, losses = 0, []
    for x, y in here.loader:
        with here.accelerator.accumulate(here.model):
            loss = functional.cross_entropy(here.model(x), y)
            losses.append(loss.item())
            here.accelerator.backward(loss)
            if here.accelerator.sync_gradients:
                here.accelerator.clip_grad_value_(here.model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        if here.accelerator.sync_gradients:
            here.log({"loss": sum(losses) / len(losses)}, at=step)
            step, losses = step + 1, []
    here.end()


@trainer("Accelerate, bf16 and a schedule")
def bf16(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    here = Prepared(trial, model, [optimizer], loader(), mixed_precision="bf16")
    schedule = here.accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
    (optimizer,) = here.optimizers
    for step, (x, y) in enumerate(here.loader):
        optimizer.zero_grad()
        with here.accelerator.autocast():
            loss = functional.cross_entropy(here.model(x), y)
        here.accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        here.log({"loss": loss.item()}, at=step)
    here.end()


@trainer("Accelerate, two optimizers")
def two_optimizers(trial: Trial) -> None:
    model = classifier()
    optimizers = [
        torch.optim.AdamW(model[:2].parameters(), lr=3e-3),
        torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9),
    ]
    here = Prepared(trial, model, optimizers, loader())
    for step, (x, y) in enumerate(here.loader):
        for optimizer in here.optimizers:
            optimizer.zero_grad()
        loss = functional.cross_entropy(here.model(x), y)
        here.accelerator.backward(loss)
        for optimizer in here.optimizers:
            optimizer.step()
        here.log({"loss": loss.item()}, at=step)
    here.end()


@pytest.mark.parametrize("program", trainer.of(__name__))
def test_trainer(program: Any, tmp_path: Path) -> None:
    program.examine(tmp_path).check()
