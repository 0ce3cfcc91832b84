"""A small training run with everything that has a state: dropout, batch norm, shuffled data, scaler, scheduler."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sonde.tune import CheckpointManager, ResumableLoader


class Noisy(Dataset):
    """Samples with new noise each time, from torch's and Python's generators."""

    def __init__(self, num_samples: int = 40) -> None:
        self.x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] + 0.1 * torch.randn(6) + 0.01 * random.random()


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.95**step),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=40),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 3, 12], gamma=0.5),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4)],
        milestones=[5],
    ),
}


@dataclass
class Training:
    """One process's worth of objects, and what came of them."""

    optimizer_name: str = "adamw"
    scheduler_name: str = "lambda"
    num_workers: int = 0
    seed: int = 0
    losses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)  # noqa: NPY002  the generator that user code shares
        self.net = make_net()
        self.optimizer = OPTIMIZERS[self.optimizer_name](self.net.parameters())
        self.scheduler = SCHEDULERS[self.scheduler_name](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.loader = ResumableLoader(DataLoader(Noisy(), 5, shuffle=True, num_workers=self.num_workers))
        self.num_steps = 0

    def manager(self, where: Any, **options: Any) -> CheckpointManager:
        return CheckpointManager(
            where,
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            dataloader=self.loader,
            **options,
        )

    def train(self, num_steps: int, after: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Train until a total number of steps."""
        while self.num_steps < num_steps:
            for x in self.loader:
                loss = self.one_step(x)
                after(self.num_steps, loss)
                if self.num_steps >= num_steps:
                    return

    def one_step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (self.net(x) - x.mean(1, keepdim=True)).square().mean() + 0.01 * np.random.rand()  # noqa: NPY002
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.num_steps += 1
        self.losses.append(loss.item().hex())
        return loss.item()

    def fingerprint(self) -> dict[str, str]:
        """Everything the next step depends on, as hashes."""
        return {
            "params": digest(self.net.state_dict()),
            "optimizer": digest(self.optimizer.state_dict()),
            "scheduler": digest(self.scheduler.state_dict()),
            "scaler": digest(self.scaler.state_dict()),
            "rng": digest([torch.get_rng_state(), random.getstate(), np.random.get_state()]),  # noqa: NPY002
            "position": f"{self.loader.epoch} {self.loader.batch}",
        }


def digest(value: Any) -> str:
    """A hash of a tree of tensors and plain values, with the types of both."""
    total = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            total.update(f"{item.dtype}{tuple(item.shape)}".encode())
            total.update(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in item:
                add(key)
                add(item[key])
        elif isinstance(item, list | tuple):
            total.update(type(item).__name__.encode())
            for each in item:
                add(each)
        elif isinstance(item, np.ndarray):
            total.update(item.tobytes())
        elif not callable(item):
            total.update(repr(item).encode())

    add(value)
    return total.hexdigest()[:16]


@pytest.fixture
def training() -> type[Training]:
    return Training


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"
