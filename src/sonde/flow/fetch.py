"""Fetches numbers from a device all at once: fetched one by one, each would wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor


class Gathered:
    """The numbers in some tensors, concatenated on their device. Gathering does not wait; `numbers` does."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._lengths = [tensor.numel() for tensor in tensors]
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, tensor.dtype), []).append(index)
        self._rows = [
            (indices, torch.cat([tensors[i].detach().reshape(-1) for i in indices])) for indices in groups.values()
        ]

    def numbers(self) -> list[list[float]]:
        """The numbers of each tensor, in order; one transfer for each device and dtype."""
        found: list[list[float]] = [[] for _ in self._lengths]
        for indices, row in self._rows:
            numbers = iter(row.tolist())
            for i in indices:
                found[i] = [float(number) for number in islice(numbers, self._lengths[i])]
        return found


def fetch(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Gather, and wait."""
    return Gathered(tensors).numbers()
