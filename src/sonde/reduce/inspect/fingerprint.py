"""One number that two copies of a model share exactly if a sample of their parameters is the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

MAX_PARAMETERS: Final = 16
MAX_ELEMENTS: Final = 64


def fingerprint(parameters: Iterable[Tensor]) -> Tensor | None:
    """A sum, weighted by place so that no two elements may change places; on the device, not waited for."""
    listed = [p for p in parameters if p.numel() and p.is_floating_point()]
    chosen = listed[:: -(-len(listed) // MAX_PARAMETERS)] if listed else []
    if not chosen:
        return None
    with torch.no_grad():
        parts = [_sample(parameter) for parameter in chosen]
        row = torch.cat([part.to(parts[0].device) for part in parts])
        weights = torch.arange(1, len(row) + 1, dtype=torch.float64, device=row.device)
        return (row * weights).sum()


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: -(-flat.numel() // MAX_ELEMENTS)].double()
