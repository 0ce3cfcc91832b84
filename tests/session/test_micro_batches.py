"""Gradients that are cleared before they are used, validation in train mode, and the data set of a batch: what the
rules read is what the program did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.reduce.inspect.step_loss import MicroBatch, StepLoss

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
STEPS = 4


def watched(model: nn.Module, optimizer: Any, folder: Path) -> Any:
    return sonde.watch(model, optimizer, dir=str(folder), verbose=False, live_rules=False, budget=None)


def values(path: Path, name: str) -> list[float]:
    run = sonde.open(path)
    return run.scalars(name)["value"].to_pylist() if name in run.scalar_names else []


def make(width: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, width))


@pytest.mark.parametrize(("clears", "lost"), [(True, 2.0), (False, 0.0)])
def test_micro_batches_that_are_cleared_are_counted(tmp_path: Path, clears: bool, lost: float) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer, tmp_path) as session:
        for _ in range(STEPS):
            for part in range(3):
                if clears:
                    optimizer.zero_grad()
                at = slice(8 * part, 8 * part + 8)
                F.cross_entropy(model(X[at]), Y[at]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert values(session.path, "data/batch/micro_batches") == [3.0] * STEPS
    # Which parameters have gradients is known once there was an update.
    assert values(session.path, "data/batch/cleared") == [0.0] + [lost] * (STEPS - 1)


def test_two_passes_over_one_batch_are_no_micro_batches(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer, tmp_path) as session:
        for _ in range(STEPS):
            for _ in range(2):  # as a sharpness-aware optimizer does
                optimizer.zero_grad()
                F.cross_entropy(model(X), Y).backward()
            optimizer.step()
    assert set(values(session.path, "data/batch/cleared")) == {0.0}


def test_the_other_model_of_a_gan_clears_nothing(tmp_path: Path) -> None:
    critic, generator = make(), nn.Linear(4, 4)
    first, second = (torch.optim.SGD(net.parameters(), 0.1) for net in (critic, generator))
    with watched(critic, first, tmp_path) as session:
        for _ in range(STEPS):
            first.zero_grad()
            F.cross_entropy(critic(X.clone()), Y).backward()
            first.step()
            second.zero_grad()
            F.cross_entropy(critic(generator(X)), 1 - Y).backward()
            second.step()
    assert set(values(session.path, "data/batch/cleared")) <= {0.0}


@pytest.mark.parametrize("is_train_mode", [True, False])
def test_the_mode_of_a_validation_is_recorded(tmp_path: Path, is_train_mode: bool) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer, tmp_path) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(X[:32]), Y[:32]).backward()
            optimizer.step()
            model.train(is_train_mode)
            with torch.no_grad():
                F.cross_entropy(model(X[32:]), Y[32:])
            model.train()
    found = values(session.path, "data/loss/validation_train_mode")
    assert found
    assert set(found) == {float(is_train_mode)}


def test_the_size_of_the_data_set_is_known_although_its_iterator_is_gone(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(X, Y), 8)
    with watched(model, optimizer, tmp_path) as session:
        for _ in range(STEPS):
            x, y = next(iter(loader))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert set(values(session.path, "data/batch/source_size")) == {48.0}


@pytest.mark.parametrize(
    "options",
    [{"weight": torch.tensor([1.0, 9.0])}, {"label_smoothing": 0.2}, {}],
    ids=["weight", "smoothing", "plain"],
)
def test_the_baseline_is_the_loss_of_the_best_constant(tmp_path: Path, options: dict[str, Any]) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    y = (X[:, 0] > 1).long()
    with watched(model, optimizer, tmp_path) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(X), y, **options).backward()
            optimizer.step()
    logits = torch.zeros(2, requires_grad=True)
    search = torch.optim.LBFGS([logits], max_iter=100)

    def closure() -> Any:
        search.zero_grad()
        loss = F.cross_entropy(logits.expand(len(y), 2), y, **options)
        loss.backward()
        return loss

    search.step(closure)
    best = float(closure().detach())
    assert values(session.path, "data/loss/baseline")[-1] == pytest.approx(best, rel=1e-3)


def test_the_baseline_of_positive_weights(tmp_path: Path) -> None:
    model = make(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    y = (X[:, :1] > 1).float()
    heavy = torch.tensor([12.0])
    with watched(model, optimizer, tmp_path) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(X), y, pos_weight=heavy).backward()
            optimizer.step()
    grid = torch.linspace(-6, 6, 20001)
    losses = -(heavy * y.mean() * F.logsigmoid(grid) + (1 - y.mean()) * F.logsigmoid(-grid))
    assert values(session.path, "data/loss/baseline")[-1] == pytest.approx(float(losses.min()), rel=1e-4)


def test_micro_batches_divided_by_all_labels_of_the_step_add_up() -> None:
    """As in Hugging Face's trainer, which also counts the labels that its models shift out of the sequence."""
    parts = [MicroBatch(3.0 * 23 / 96, (1 / 96,), 23.0) for _ in range(4)]
    assert StepLoss().of_step(parts) == pytest.approx(3.0 * 23 / 24)
    assert StepLoss().of_step([MicroBatch(3.0 * 23 / 24, (1 / 24,), 23.0)]) == pytest.approx(3.0 * 23 / 24)
