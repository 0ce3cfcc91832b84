"""Numbers that may still be on a device: starts their copy to the host without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.reduce.dense import UnreadableError, dense, whole
from sonde.reduce.transfer import HostTransfer
from sonde.schema.words import dtype_name


def one_element(tensor: Tensor) -> Tensor:
    """A tensor's one element, as a plain tensor; UnreadableError says why there is none. Never waits.

    >>> float(one_element(torch.tensor([[2.5]], requires_grad=True)))
    2.5
    """
    tensor = whole(tensor)
    if tensor.is_nested or tensor.numel() != 1:
        shape = "nested parts" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
        raise UnreadableError(
            f"a tensor of {shape} is not a single number. Log its mean, for example, or record its statistics with "
            "sonde.tap(name, tensor)"
        )
    if tensor.is_complex():
        raise UnreadableError(
            f"{dtype_name(tensor.dtype)} is not a real number. Log tensor.abs(), or its real and imaginary parts "
            "under two names"
        )
    if tensor.is_meta:
        raise UnreadableError("a tensor on the meta device has no value")
    values, num_zeros = dense(tensor.detach())
    if num_zeros:
        return torch.zeros((), device=values.device)
    # The training loop may change its tensors in place right after. On a GPU they are copied when they are sent, and on
    # the host they are read at once.
    return values.reshape(()) if values.is_cuda or values.is_cpu else values.reshape(()).clone()


class PendingScalars:
    """One-element tensors being copied to the host. `resolve()` waits; it is called on the writer thread."""

    __slots__ = ("_places", "_transfers", "_values")

    def __init__(self, tensors: Sequence[Tensor], *, are_ours: bool = False) -> None:
        self._values: list[Tensor | None] = []
        by_device: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.is_cuda:
                self._values.append(None)
                by_device.setdefault(tensor.device, []).append(place)
            else:
                # Copy now: the training loop may change its tensors in place right after.
                self._values.append(tensor if are_ours else tensor.detach().clone())
        self._places = list(by_device.values())
        self._transfers = [HostTransfer([tensors[place].detach() for place in places]) for places in self._places]

    def resolve(self) -> list[float]:
        found = [0.0 if value is None else float(value) for value in self._values]
        for places, transfer in zip(self._places, self._transfers, strict=True):
            for place, numbers in zip(places, transfer.open(), strict=True):
                found[place] = float(numbers[0])
        return found
