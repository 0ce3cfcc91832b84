"""The mean loss of an evaluation, summed on the device batch by batch. Nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor

from sonde.reduce.inspect.data import is_integer
from sonde.reduce.inspect.step_loss import StepLoss


class Evaluated:
    """The results of one type of call in an evaluation."""

    def __init__(self, *, is_sum: bool) -> None:
        self.is_sum = is_sum
        """Whether each value is already a sum over the terms of its batch."""
        self.total = self.weight = torch.zeros(())
        self._num_batches = 0

    def add(self, value: Tensor, weight: Tensor | float) -> None:
        """Add the value of one batch, and its number of terms."""
        if not self._num_batches:
            dtype = torch.float32 if value.device.type == "mps" else torch.float64
            self.total, self.weight = (torch.zeros((), dtype=dtype, device=value.device) for _ in range(2))
        self._num_batches += 1
        self.weight += weight
        self.total += value if self.is_sum else value.to(self.total.dtype) * weight

    def mean(self, total: float, weight: float, training: StepLoss) -> float:
        """In the units of the training loss: per term, or per batch if training uses sums over batches."""
        if self.is_sum and not training.is_per_term:
            weight = float(self._num_batches)
        return total / weight * training.factor if weight else float("nan")


def num_terms(name: str, target: Tensor, reduction: str, ignore_index: int) -> Tensor | float:
    """The number of terms that a loss function sums or averages; ignored targets do not count."""
    if name in ("cross_entropy", "nll_loss") and is_integer(target):
        return (target != ignore_index).sum()
    if reduction == "batchmean":
        return float(len(target)) if target.ndim else 1.0
    classes = target.shape[1] if name == "cross_entropy" and target.ndim > 1 else 1
    return float(max(target.numel() // max(classes, 1), 1))
