"""Memory use of this process and of the machine, without waiting for a device.

Torch is imported only when a torch device is queried.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from sonde.schema.words import MIB

if TYPE_CHECKING:
    import torch

_STATM: Final = Path("/proc/self/statm")


def resident_mb() -> float:
    """Resident memory of the process."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    except (OSError, ValueError, IndexError):  # not Linux
        return float(psutil.Process().memory_info().rss) / MIB


def gpu_mb(device: torch.device) -> float | None:
    """Memory that tensors hold on a CUDA device; None on others."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.memory_allocated(device) / MIB


def memory_shares(device: Any) -> list[float]:
    """Memory in use on the host and on the CUDA device, from 0 to 1. Memory that torch has only reserved counts as
    free."""
    shares = [float(psutil.virtual_memory().percent) / 100]
    if device is not None:
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        shares.append(torch.cuda.memory_allocated(device) / total)
    return shares
