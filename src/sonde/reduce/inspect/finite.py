"""Whether tensors are finite, one number each, without waiting: a sum is finite only if all it adds up is.

The cheapest test there is: one reading, one scalar. In float32 a sum of huge but finite numbers may overflow; a tensor
that near to the end of the range is reported as infinite, which it is about to be.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from sonde.reduce.scalars import PendingScalars

SAMPLED_FROM: Final = 1 << 20
"""On a device, tensors with more elements are read in part: one row in ROW_STRIDE, another one each step."""
ROW_STRIDE: Final = 8


def total(tensor: Tensor, step: int, *, in_part: bool) -> Tensor:
    """A number that is finite if the tensor is; of some rows of it only, where it is asked for in part."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if in_part:
        # Rows are what the last dimension runs along: a batch alone may have fewer than are left out.
        tensor = tensor.view(-1, tensor.shape[-1])[step % ROW_STRIDE :: ROW_STRIDE]
    return tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def is_sampled(tensor: Tensor) -> bool:
    """Whether only some rows of it are looked at. The processor's cache makes a sum on the host cheap enough."""
    return (
        not tensor.is_cpu
        and tensor.numel() > SAMPLED_FROM
        and tensor.is_contiguous()
        and tensor.numel() // tensor.shape[-1] >= 2 * ROW_STRIDE
    )


class FiniteFlags:
    """Collects one number per tensor until `take`. Keeps no tensor but those numbers."""

    def __init__(self) -> None:
        # Pairs, in one list: hooks may fire on several threads, and two lists would become unequal.
        self._found: list[tuple[Any, Tensor]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, key: Any, tensor: Tensor, step: int, *, in_part: bool) -> None:
        """Where gradients are off, or the numbers would keep the graph alive."""
        if tensor.numel():
            self._found.append((key, total(tensor, step, in_part=in_part)))

    def take(self) -> tuple[list[Any], PendingScalars] | None:
        """Keys, and their numbers on the way to the host."""
        if not self._found:
            return None
        found, self._found = self._found, []
        keys, totals = zip(*found, strict=True)
        return list(keys), PendingScalars(totals, are_ours=True)
