"""How much memory this process uses, in microseconds and without waiting for a device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

_MIB: Final = 1 << 20
_STATM: Final = Path("/proc/self/statm")


def resident_mb() -> float:
    """Resident memory of the process."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB
    except (OSError, ValueError, IndexError):  # not Linux
        import psutil

        return float(psutil.Process().memory_info().rss) / _MIB


def gpu_mb(device: torch.device) -> float | None:
    """Memory that tensors hold on a CUDA device; None on others."""
    return torch.cuda.memory_allocated(device) / _MIB if device.type == "cuda" else None
