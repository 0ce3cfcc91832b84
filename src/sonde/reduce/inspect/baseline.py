"""The loss of the best constant prediction, from the targets seen so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sonde.reduce.dense import is_plain
from sonde.reduce.inspect.data import MAX_ELEMENTS, is_integer, sorted_labels

MAX_CLASSES: Final = 1024
"""Larger vocabularies have no baseline: most of their words are not in the sample."""


@dataclass(frozen=True, slots=True)
class Balance:
    """How a loss weighs its terms."""

    weight: Tensor | None = None
    """Of each class for cross entropy; otherwise of each element."""
    pos_weight: Tensor | None = None
    smoothing: float = 0.0


EVEN: Final = Balance()


class Baseline:
    """Keeps running class frequencies, or a running mean and variance, on the targets' device."""

    def __init__(self) -> None:
        self.class_entropy: Tensor | None = None
        """Entropy of the classes, where the baseline is of another distribution because the loss weighs them."""
        self._counts: Tensor | None = None
        self._num = 0
        self._shift: Tensor | None = None
        self._sum: Tensor | None = None
        self._square: Tensor | None = None

    def of_loss(
        self, name: str, target: Tensor, num_classes: int, ignore_index: int, balance: Balance = EVEN
    ) -> Tensor | None:
        """Add these targets; returns the baseline of this loss so far, None if it has none."""
        if not target.numel() or not is_plain(target):
            return None
        if name in ("cross_entropy", "nll_loss") and is_integer(target):
            return self._entropy(target, num_classes, ignore_index, balance)
        if balance.weight is not None:
            return None  # elements with their own weights have no common constant
        if name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
            self._take(target)
            mean, _ = self._moments()
            if balance.pos_weight is not None:
                self.class_entropy = -(torch.xlogy(mean, mean) + torch.xlogy(1 - mean, 1 - mean)).mean()
            scale = 1.0 if balance.pos_weight is None else balance.pos_weight.to(mean)
            best = scale * mean / (scale * mean + 1 - mean)
            return -(scale * torch.xlogy(mean, best) + torch.xlogy(1 - mean, 1 - best)).mean()
        if name == "mse_loss":
            self._take(target)
            return self._moments()[1].mean()
        if name == "l1_loss":
            self._take(target)
            return (_table(target) - self._moments()[0]).abs().mean()
        return None

    def _entropy(self, target: Tensor, num_classes: int, ignore_index: int, balance: Balance) -> Tensor | None:
        if not 1 < num_classes <= MAX_CLASSES:
            return None
        labels = sorted_labels(target, ignore_index)
        edges = torch.arange(num_classes, device=labels.device)
        # Not bincount, which waits for the device, nor scatter_add, which is not deterministic there.
        counts = torch.searchsorted(labels, edges, right=True) - torch.searchsorted(labels, edges)
        if self._counts is not None and self._counts.shape == counts.shape and self._counts.device == counts.device:
            counts = counts + self._counts
        self._counts = counts
        if balance.weight is not None or balance.smoothing:
            p = counts / counts.sum()
            self.class_entropy = -torch.xlogy(p, p).sum()
        if balance.weight is not None:
            counts = counts * balance.weight.to(counts.device)
        p = counts / counts.sum()
        p = (1 - balance.smoothing) * p + balance.smoothing / num_classes
        return -torch.xlogy(p, p).sum()

    def _take(self, target: Tensor) -> None:
        table = _table(target)
        if self._sum is None or self._sum.shape != table.shape[1:] or self._sum.device != table.device:
            # Deviations from the first mean: squares of large numbers would lose their differences.
            self._shift = table.mean(0)
            self._num, self._sum, self._square = 0, torch.zeros_like(self._shift), torch.zeros_like(self._shift)
        assert self._shift is not None
        assert self._square is not None
        apart = table - self._shift
        self._num += len(table)
        self._sum = self._sum + apart.sum(0)
        self._square = self._square + apart.square().sum(0)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each column."""
        assert self._sum is not None
        assert self._square is not None
        assert self._shift is not None
        mean = self._sum / self._num
        return self._shift + mean, (self._square / self._num - mean.square()).clamp(min=0)


def _table(target: Tensor) -> Tensor:
    """(rows, columns): a constant prediction has one value for each unit of the last dimension."""
    width = target.shape[-1] if target.ndim > 1 else 1
    rows = target.reshape(-1, width)
    step = -(-rows.shape[0] // max(MAX_ELEMENTS // width, 1))
    return rows[::step].to(torch.float64 if target.device.type != "mps" else torch.float32)
