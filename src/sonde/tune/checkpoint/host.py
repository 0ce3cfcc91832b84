"""A copy of a checkpoint's tensors that training can no longer change, without waiting for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sonde.tune.checkpoint.storage import Payload


def copied_to_host(payload: Payload) -> Callable[[], Payload]:
    """Start the copy; the returned function waits for it, on the writing thread.

    Later work of training on a device is queued after the copies, so they show this moment.
    """
    copies: dict[str, dict[str, Tensor]] = {}
    devices: set[torch.device] = set()
    for stem, tensors in payload.tensors.items():
        copies[stem] = {}
        for name, tensor in tensors.items():
            copies[stem][name] = _copy(tensor, devices)
    events = [_event(device) for device in devices]

    def ready() -> Payload:
        for event in events:
            event.synchronize()
        return Payload(copies, payload.state, payload.documents)

    return ready


def _copy(tensor: Tensor, devices: set[torch.device]) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    devices.add(tensor.device)
    source = tensor.detach().contiguous()
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return target.copy_(source, non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
