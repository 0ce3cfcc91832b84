"""Copies of small tensors for the writer, which waits for those still being copied from a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.reduce.dense import dense, is_plain
from sonde.reduce.transfer import HostTransfer


class PendingCopies:
    """Copies made now, without waiting."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        values = [dense(tensor.detach())[0].reshape(-1) for tensor in tensors]
        self._dtypes = [np.float64 if value.dtype == torch.float64 else np.float32 for value in values]
        self._open: Callable[[], Sequence[NDArray[Any]]]
        if values[0].is_cpu:
            copies = [value.to(torch.float64 if value.dtype == torch.float64 else torch.float32) for value in values]
            own = [c.clone() if c is value else c for c, value in zip(copies, values, strict=True)]
            self._open = lambda: [copy.numpy() for copy in own]
        else:
            self._open = HostTransfer(values).open

    def resolve(self) -> list[NDArray[Any]]:
        """Flat arrays. Waits for the device, so do not call it on the training thread."""
        return [array.astype(dtype, copy=False) for array, dtype in zip(self._open(), self._dtypes, strict=True)]


def can_copy(tensor: Tensor, max_bytes: int) -> bool:
    """Whether a tensor is small enough, and of real numbers in a strided layout."""
    return is_plain(tensor) and tensor.dtype.is_floating_point and tensor.numel() * tensor.itemsize <= max_bytes
