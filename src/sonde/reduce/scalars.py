"""Numbers that may still be on a device: their copy to the host is started, not waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.reduce.handover import Parcel


class PendingScalars:
    """One-element tensors on their way to the host. `resolve()` waits; it is called on the writer's thread."""

    __slots__ = ("_parcels", "_places", "_values")

    def __init__(self, tensors: Sequence[Tensor], *, are_ours: bool = False) -> None:
        self._values: list[Tensor | None] = []
        by_device: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.is_cuda:
                self._values.append(None)
                by_device.setdefault(tensor.device, []).append(place)
            else:
                # A copy is taken now: the training loop may change its tensors in place right after.
                self._values.append(tensor if are_ours else tensor.detach().clone())
        self._places = list(by_device.values())
        self._parcels = [Parcel([tensors[place].detach() for place in places]) for places in self._places]

    def resolve(self) -> list[float]:
        found = [0.0 if value is None else float(value) for value in self._values]
        for places, parcel in zip(self._places, self._parcels, strict=True):
            for place, numbers in zip(places, parcel.open(), strict=True):
                found[place] = float(numbers[0])
        return found
