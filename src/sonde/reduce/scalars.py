"""Numbers that may still be on a device: their copy to the host is started, not waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class PendingScalars:
    """One-element tensors on their way to the host. `resolve()` waits; it is called on the writer's thread."""

    __slots__ = ("_arrived", "_columns", "_num")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # A copy is taken now: the training loop may change a tensor in place right after. One for all of a kind:
        # a hundred numbers are one launch and one transfer.
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, tensor in enumerate(tensors):
            groups.setdefault((tensor.device, tensor.dtype), []).append(place)
        self._num = len(tensors)
        self._columns = [
            (places, _start_copy(torch.stack([tensors[place].detach().reshape(()) for place in places])))
            for places in groups.values()
        ]
        self._arrived: list[Any] = []
        for device in {device for device, _ in groups if device.type == "cuda"}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._arrived.append(event)

    def resolve(self) -> list[float]:
        for event in self._arrived:
            event.synchronize()
        values = [0.0] * self._num
        for places, column in self._columns:
            for place, value in zip(places, column.tolist(), strict=True):
                values[place] = float(value)
        return values


def _start_copy(column: Tensor) -> Tensor:
    if column.device.type != "cuda":
        return column
    host = torch.empty(column.shape, dtype=column.dtype, device="cpu", pin_memory=True)
    return host.copy_(column, non_blocking=True)
