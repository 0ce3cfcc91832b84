"""Tiny data sets for the programs that are not about texts: blobs, digits, curves, images."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def blobs(num: int = 1200, classes: int = 6, width: int = 16, seed: int = 0, noise: float = 1.4) -> TensorDataset:
    """Overlapping clusters, normalised."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(11)) * 1.2
    g = torch.Generator().manual_seed(300 + seed)
    y = torch.randint(classes, (num,), generator=g)
    x = centres[y] + noise * torch.randn(num, width, generator=g)
    return TensorDataset(x / 1.8, y)


def curves(num: int = 1200, width: int = 8, seed: int = 0) -> TensorDataset:
    """A smooth function of some numbers, with a little noise."""
    g = torch.Generator().manual_seed(400 + seed)
    x = torch.randn(num, width, generator=g)
    way = torch.randn(width, 2, generator=torch.Generator().manual_seed(12)) / width**0.5
    y = torch.sin(2 * x @ way[:, :1]) + 0.5 * (x @ way[:, 1:]).square() - 0.5
    return TensorDataset(x, y + 0.05 * torch.randn(num, 1, generator=g))


def images(num: int = 800, size: int = 12, seed: int = 0) -> TensorDataset:
    """A bright bar at one of four angles, in noise."""
    g = torch.Generator().manual_seed(500 + seed)
    y = torch.randint(4, (num,), generator=g)
    grid = torch.arange(size) - size / 2 + 0.5
    angle = y.float() * torch.pi / 4
    offset = torch.rand(num, generator=g) * 4 - 2
    distance = angle.cos()[:, None, None] * grid[:, None] + angle.sin()[:, None, None] * grid - offset[:, None, None]
    x = (distance.abs() < 1.2).float() + 0.35 * torch.randn(num, size, size, generator=g)
    return TensorDataset((x[:, None] - 0.2) / 0.5, y)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(fan_in, fan_out)] + ([activation()] if place < len(widths) - 2 else [])
    return nn.Sequential(*layers)


def convnet(classes: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(24, classes),
    )  # fmt: skip


def accuracy(output: Tensor, y: Tensor) -> float:
    return float((output.argmax(-1) == y).float().mean())
