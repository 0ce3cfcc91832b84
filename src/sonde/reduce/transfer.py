"""Copies numbers from a device to the host without waiting: into pinned memory, followed by a ready flag.

The thread that opens a transfer polls the ready flag in its own memory and makes no CUDA call: a call from another
thread while the training thread captures a CUDA graph would end that capture. So would freeing pinned memory in
between: that memory is reused in a ring of ours.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.schema.sketch import Array

_PATIENCE_S: Final = 30.0
"""After this long the device itself is queried: if it has failed, it says so."""
_MAX_FREE: Final = 8

_free: dict[int, deque[Tensor]] = {}
_ready_flags: dict[torch.device, Tensor] = {}


class HostTransfer:
    """Tensors of one device being copied to the host, as float64. Sent from the device's current stream."""

    __slots__ = ("_event", "_host", "_lock", "_numels", "_opened")

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        device = pieces[0].device
        numbers = _joined([piece.reshape(-1) for piece in pieces])
        self._numels = [piece.numel() for piece in pieces]
        self._opened: list[Array] | None = None
        self._lock = threading.Lock()
        self._host = _buffer(numbers.numel(), device)
        self._host[-1] = 0.0
        self._host[: numbers.numel()].copy_(numbers, non_blocking=True)
        # In stream order: when the ready flag has arrived, so has everything before it.
        self._host[-1:].copy_(_ready_flag(device), non_blocking=True)
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def open(self) -> list[Array]:
        """The numbers of each piece. Waits for them, so do not call it on the training thread."""
        with self._lock:
            if self._opened is None:
                host = self._host.numpy()
                self._wait(host)
                ends = np.cumsum(self._numels)
                self._opened = np.split(host[: ends[-1]].copy(), ends[:-1])
                _give_back(self._host)
            return self._opened

    def _wait(self, host: Array) -> None:
        deadline, pause_s = time.perf_counter() + _PATIENCE_S, 50e-6
        while host[-1] != 1.0:
            if time.perf_counter() > deadline:
                self._event.synchronize()
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2e-3)


def _joined(pieces: list[Tensor]) -> Tensor:
    """All pieces in sequence, in float64. Each conversion is a launch: pieces of one dtype are joined first."""
    if all(piece.dtype == pieces[0].dtype for piece in pieces):
        return torch.cat(pieces).to(torch.float64)
    return torch.cat([piece.to(torch.float64) for piece in pieces])


def _buffer(numel: int, device: torch.device) -> Tensor:
    """Pinned memory for `numel` numbers and a ready flag; of a few sizes only, so that it can be reused."""
    size = max(1 << numel.bit_length(), 1024)
    try:
        return _free[size].pop()
    except (KeyError, IndexError):
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")


def _give_back(host: Tensor) -> None:
    known = _free.setdefault(len(host), deque(maxlen=_MAX_FREE))
    if len(known) < _MAX_FREE:
        known.append(host)


def _ready_flag(device: torch.device) -> Tensor:
    if device not in _ready_flags:
        with torch.inference_mode(False):
            _ready_flags[device] = torch.ones(1, dtype=torch.float64, device=device)
    return _ready_flags[device]
