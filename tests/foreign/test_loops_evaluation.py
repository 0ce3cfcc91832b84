"""Loops that do something between steps: evaluate, measure the accuracy once more, go back to a checkpoint."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional

from synthetic import clusters
from trial import Trial, loop

STEPS = 40


def classifier(dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 4),
    )


def start(trial: Trial, lr: float = 3e-3):
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    trial.watch(model, optimizer)
    return model, optimizer


def step_of(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


@loop("evaluation under no_grad")
def no_grad(trial: Trial) -> None:
    model, optimizer = start(trial)
    held_out = next(clusters(batch=200, seed=9))
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = step_of(model, optimizer, x, y)
        trial.log({"loss": loss}, at=step)
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                out = model(held_out[0])
                held = functional.cross_entropy(out, held_out[1])
            model.train()
            accuracy = (out.argmax(1) == held_out[1]).float().mean()
            trial.log({"val_loss": held, "val_acc": accuracy}, at=step)


@loop("evaluation under inference_mode")
def inference(trial: Trial) -> None:
    model, optimizer = start(trial)
    held_out = next(clusters(batch=200, seed=9))

    @torch.inference_mode()
    def evaluate() -> float:
        model.eval()
        loss = functional.cross_entropy(model(held_out[0]), held_out[1]).item()
        model.train()
        return loss

    trial.log({"val_loss": evaluate()}, at=0)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = step_of(model, optimizer, x, y)
        if step % 8 == 7:
            trial.log({"val_loss": evaluate()}, at=step)
        trial.log({"loss": loss.item()}, at=step)


@loop("evaluation without no_grad", is_quick=True)
def with_grad(trial: Trial) -> None:
    """`model.eval()` alone: the forward passes leave a graph behind, and are no part of a step."""
    model, optimizer = start(trial)
    held_out = next(clusters(batch=200, seed=9))
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = step_of(model, optimizer, x, y)
        if step % 5 == 4:
            model.eval()
            with trial.aside():
                out = model(held_out[0])
            model.train()
            trial.log({"val_loss": functional.cross_entropy(out, held_out[1])}, at=step)
        trial.log({"loss": loss}, at=step)


@loop("accuracy by a forward pass after the step", is_quick=True)
def accuracy_after(trial: Trial) -> None:
    model, optimizer = start(trial)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = step_of(model, optimizer, x, y)
        with trial.aside():
            accuracy = (model(x).argmax(1) == y).float().mean()
        trial.log({"loss": loss, "accuracy": accuracy}, at=step)


@loop("accuracy by a forward pass after the step, no dropout")
def accuracy_after_eval(trial: Trial) -> None:
    model, optimizer = start(trial)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = step_of(model, optimizer, x, y)
        model.eval()
        with trial.aside():
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        model.train()
        trial.log({"loss": loss.item(), "accuracy": accuracy}, at=step)


@loop("accuracy by a forward pass before the step")
def accuracy_before(trial: Trial) -> None:
    model, optimizer = start(trial)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean()
        loss = step_of(model, optimizer, x, y)
        trial.log({"loss": loss, "accuracy": accuracy}, at=step)


@loop("logged at the end of each epoch")
def epochs(trial: Trial) -> None:
    model, optimizer = start(trial)
    held_out, batches, step = next(clusters(batch=200, seed=9)), clusters(), 0
    for _ in range(4):
        model.train()
        total = 0.0
        for _ in range(10):
            total += step_of(model, optimizer, *next(batches)).item()
            step += 1
        model.eval()
        with torch.no_grad():
            held = functional.cross_entropy(model(held_out[0]), held_out[1])
        trial.log({"train_loss": total / 10, "val_loss": held}, at=step - 1)


@loop("the user's own count of steps")
def own_count(trial: Trial) -> None:
    """`log(step=…)` is where the user says it is."""
    model, optimizer = start(trial)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = step_of(model, optimizer, x, y)
        trial.log({"loss": loss}, at=step, step=step)


@loop("back to a checkpoint", is_quick=True)
def rewound(trial: Trial) -> None:
    """A bad stretch is thrown away: model and optimizer are loaded again, and the steps are repeated."""
    model, optimizer = start(trial)
    kept, batches = None, clusters()
    for step in range(15):
        if step == 10:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        trial.log({"loss": step_of(model, optimizer, *next(batches))}, at=step)
    assert kept is not None
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    trial.rewind(10)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for step in range(10, 30):
        trial.log({"loss": step_of(model, optimizer, *next(batches))}, at=step)


@loop("back to a checkpoint twice", is_quick=True)
def rewound_twice(trial: Trial) -> None:
    model, optimizer = start(trial)
    batches, kept = clusters(), {}

    def go(steps: range) -> None:
        for step in steps:
            kept[step] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            trial.log({"loss": step_of(model, optimizer, *next(batches))}, at=step)

    def back(step: int) -> None:
        model.load_state_dict(kept[step][0])
        optimizer.load_state_dict(kept[step][1])
        trial.rewind(step)

    go(range(12))
    back(8)
    go(range(8, 10))
    back(5)
    go(range(5, 25))


@loop("back to a checkpoint, and ended before it was left")
def rewound_and_shorter(trial: Trial) -> None:
    """The last history is the run, also where the one before it came further."""
    model, optimizer = start(trial)
    batches, kept = clusters(), {}
    for step in range(30):
        kept[step] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        trial.log({"loss": step_of(model, optimizer, *next(batches))}, at=step)
    model.load_state_dict(kept[20][0])
    optimizer.load_state_dict(kept[20][1])
    trial.rewind(20)
    for step in range(20, 25):
        trial.log({"loss": step_of(model, optimizer, *next(batches))}, at=step)


@loop("early stopping that restores the best weights")
def early_stopping(trial: Trial) -> None:
    model, optimizer = start(trial)
    held_out, best, kept = next(clusters(batch=200, seed=9)), float("inf"), None
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = step_of(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            held = functional.cross_entropy(model(held_out[0]), held_out[1]).item()
        model.train()
        if held < best:
            best, kept = held, copy.deepcopy(model.state_dict())
        trial.log({"loss": loss, "val_loss": held}, at=step)
    assert kept is not None
    model.load_state_dict(kept)


@loop("learning rate finder, then training")
def rate_finder(trial: Trial) -> None:
    """A sweep on a copy that is not watched, as libraries do it."""
    model, optimizer = start(trial)
    other = copy.deepcopy(model)
    trying = torch.optim.SGD(other.parameters(), lr=1e-4)
    for x, y in islice(clusters(seed=3), 10):
        step_of(other, trying, x, y)
        trying.param_groups[0]["lr"] *= 2
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        trial.log({"loss": step_of(model, optimizer, x, y)}, at=step)


@loop("a step that raises and is caught", is_quick=True)
def caught(trial: Trial) -> None:
    """Out of memory in the forward pass: the batch is left out."""
    model, optimizer = start(trial)
    step = 0
    for batch, (x, y) in enumerate(islice(clusters(), STEPS)):
        is_too_large = batch % 7 == 3
        try:
            optimizer.zero_grad()
            with trial.aside() if is_too_large else nullcontext():
                out = model(x)
            if is_too_large:
                raise RuntimeError("out of memory")
            loss = functional.cross_entropy(out, y)
        except RuntimeError:
            continue
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)
        step += 1


@loop("batches without a step")
def skipped_batches(trial: Trial) -> None:
    """A loss that is too large is left out, after its backward pass."""
    model, optimizer = start(trial)
    step = 0
    for batch, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if batch % 6 == 5:
            continue
        optimizer.step()
        trial.log({"loss": loss}, at=step)
        step += 1


@pytest.mark.parametrize("program", loop.of(__name__))
def test_loop(program, tmp_path) -> None:
    program.examine(tmp_path).check()
