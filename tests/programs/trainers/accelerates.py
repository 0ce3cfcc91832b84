"""Programs in a loop with Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sonde.adapters.accelerate import SondeTracker
from trainers.points import blobs, convnet, curves, images, mlp
from trainers.program import program
from trainers.texts import corpus, gpt

STUCK = ("underfitting", "loss_plateau", "constant_output")


def loop(
    folder: Path, model: nn.Module, data: Any, *, lr: float = 2e-3, steps: int = 200, batch: int = 32,
    shuffle: bool = True, accumulate: int = 1, val: Any = None, is_val_in_train_mode: bool = False,
    clears: Callable[[int], bool] = lambda step: True, schedule: Any = None, optimizer: Any = None, loss_of: Any = None,
    log_every: int = 1,
) -> None:  # fmt: skip
    """A training loop as in Accelerate's documentation."""
    AcceleratorState._reset_state(True)
    tracker = SondeTracker(project="trainers", dir=str(folder), verbose=False)
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=accumulate)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr)
    loader = data if isinstance(data, list) else DataLoader(data, batch, shuffle=shuffle, drop_last=True)
    scheduler = schedule(optimizer) if schedule else torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.init_trackers("trainers", config={"lr": lr})
    tracker.watch(model, optimizer)
    held_out = None if val is None else DataLoader(val, 128)
    loss_of = loss_of or (
        lambda net, pair: (F.cross_entropy if pair[1].dtype == torch.int64 else F.mse_loss)(net(pair[0]), pair[1])
    )
    number = 0
    try:
        while number < steps * accumulate:
            for pair in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, pair)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    if clears(number):
                        optimizer.zero_grad()
                number += 1
                if number % log_every == 0:
                    accelerator.log({"train_loss": loss.item()})
                if held_out is not None and number % (25 * accumulate) == 0:
                    if not is_val_in_train_mode:
                        model.eval()
                    with torch.no_grad():
                        values = [loss_of(model, pair).item() for pair in held_out]
                    model.train()
                    accelerator.log({"val_loss": sum(values) / len(values)})
                if number >= steps * accumulate:
                    break
    finally:
        accelerator.end_training()


@program("accelerate_lr_high", "lr_too_high", also_ok=("loss_oscillation", "dead_relu", "exploding_gradients", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    loop(folder, gpt(), corpus(), lr=3e-3 if fixed else 0.2, batch=16, steps=150,
         loss_of=lambda net, batch: net(**batch).loss)  # fmt: skip


@program("accelerate_warmup_never_ends", "lr_too_low", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    steps = 20 if fixed else 200_000
    loop(
        folder,
        mlp(16, 64, 64, 6),
        blobs(),
        val=blobs(256, seed=1),
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / steps, 1.0)),
    )


@program("accelerate_zero_grad_each_micro_batch", "zero_grad_too_often", also_ok=("gradient_noise", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    """The author counts micro-batches, and clears gradients outside of the condition."""
    AcceleratorState._reset_state(True)
    model = mlp(16, 64, 64, 6)
    tracker = SondeTracker(project="trainers", dir=str(folder), verbose=False)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(blobs(2400), 4, shuffle=True))
    accelerator.init_trackers("trainers")
    tracker.watch(model, optimizer)
    for number, (x, y) in enumerate(loader):
        if not fixed or number % 4 == 0:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss / 4)
        if number % 4 == 3:
            optimizer.step()
            accelerator.log({"loss": loss.item()})
    accelerator.end_training()


@program("accelerate_no_zero_grad", "missing_zero_grad", also_ok=("lr_too_high", "loss_oscillation", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    model = mlp(16, 64, 64, 6)
    loop(folder, model, blobs(), clears=lambda number: fixed, optimizer=torch.optim.SGD(model.parameters(), 0.05))


@program("accelerate_val_in_train_mode", "train_mode_validation", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    net = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.4), nn.Linear(128, 6))
    loop(folder, net, blobs(), val=blobs(256, seed=1), is_val_in_train_mode=not fixed)


@program("accelerate_val_in_train_mode_bn", "train_mode_validation", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    loop(folder, convnet(), images(), val=images(200, seed=1), is_val_in_train_mode=not fixed)


@program("accelerate_not_shuffled", "data_not_shuffled", also_ok=("loss_oscillation", "lr_too_high", "overfitting"))
def _(folder: Path, fixed: bool) -> None:
    x, y = blobs(960).tensors
    order = y.argsort()
    loop(folder, mlp(16, 64, 6), TensorDataset(x[order], y[order]), shuffle=fixed)


@program("accelerate_decay_too_fast", "lr_decay_too_fast", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    loop(folder, mlp(8, 64, 64, 1), curves(), lr=1e-3, val=curves(256, seed=1),
         schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.995 if fixed else 0.8))  # fmt: skip


@program("accelerate_frozen_stem", "frozen_layers", also_ok=STUCK, source="requires_grad_(False) left over")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(8, 64, 64, 64, 1)
    if not fixed:
        model[:5].requires_grad_(False)
    loop(folder, model, curves(), val=curves(256, seed=1))


@program("accelerate_same_batch", "data_duplication", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    """Calls next(iter(loader)) at each step."""
    AcceleratorState._reset_state(True)
    model = mlp(16, 64, 6)
    tracker = SondeTracker(project="trainers", dir=str(folder), verbose=False)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = DataLoader(blobs(), 32, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("trainers")
    tracker.watch(model, optimizer)
    endless = iter(loader)
    for _ in range(150):
        if fixed:
            x, y = next(endless, (None, None))
            if x is None:
                endless = iter(loader)
                x, y = next(endless)
        else:
            x, y = next(iter(loader))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss.item()})
    accelerator.end_training()


@program("accelerate_no_labels", "no_labels", also_ok=("nan_inf", "lr_not_applied", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    x, y = blobs().tensors
    loop(folder, mlp(16, 64, 6), TensorDataset(x, y if fixed else torch.full_like(y, -100)))


@program("h_accelerate_gpt")
def _(folder: Path, fixed: bool) -> None:
    loop(
        folder, gpt(), corpus(), lr=3e-3, batch=16, steps=120, loss_of=lambda net, batch: net(**batch).loss, log_every=5
    )


@program("h_accelerate_accumulate")
def _(folder: Path, fixed: bool) -> None:
    loop(folder, mlp(16, 64, 64, 6), blobs(), batch=8, accumulate=4, val=blobs(256, seed=1), steps=120)


@program("h_accelerate_images")
def _(folder: Path, fixed: bool) -> None:
    loop(folder, convnet(), images(), val=images(200, seed=1))


@program("h_accelerate_class_weights", source="one sample in ten, weighted by nine")
def _(folder: Path, fixed: bool) -> None:
    x, y = blobs(6000, classes=2, width=8, noise=2.5).tensors
    keep = (y == 0) | (torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.11)
    weight = torch.tensor([1.0, 9.0])
    loop(folder, mlp(8, 32, 2), TensorDataset(x[keep], y[keep]),
         loss_of=lambda net, pair: F.cross_entropy(net(pair[0]), pair[1], weight=weight))  # fmt: skip


@program("h_accelerate_short")
def _(folder: Path, fixed: bool) -> None:
    loop(folder, mlp(8, 64, 64, 1), curves(), lr=5e-4, steps=45)
