"""Numbers that may still be on a device: their copy to the host is started, not waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class PendingScalars:
    """One-element tensors on their way to the host. `resolve()` waits; it is called on the writer's thread."""

    __slots__ = ("_arrived", "_values")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # A copy is taken now: the training loop may change the tensor in place right after.
        self._values = [_start_copy(tensor.detach()) for tensor in tensors]
        self._arrived: list[Any] = []
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._arrived.append(event)

    def resolve(self) -> list[float]:
        for event in self._arrived:
            event.synchronize()
        return [float(value) for value in self._values]


def _start_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
