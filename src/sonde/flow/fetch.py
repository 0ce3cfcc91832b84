"""Numbers from a device, all at once: asked for one by one, each would wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fetch(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers in each tensor, in its order; one transfer for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    found: list[list[float]] = [[] for _ in tensors]
    for indices in groups.values():
        numbers = iter(torch.cat([tensors[i].detach().reshape(-1) for i in indices]).tolist())
        for i in indices:
            found[i] = [float(next(numbers)) for _ in range(tensors[i].numel())]
    return found
