"""How much memory this process uses and how full the memory is, without waiting for a device.

Torch is imported only where a device of torch's is asked about.
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
    """The host's memory in use, and the CUDA device's, from 0 to 1. What torch has only reserved counts as free."""
    shares = [float(psutil.virtual_memory().percent) / 100]
    if device is not None:
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        shares.append(torch.cuda.memory_allocated(device) / total)
    return shares
