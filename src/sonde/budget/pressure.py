"""How full the memory is. Torch is not imported for it: without a device of torch's there is only the host's."""

from __future__ import annotations

from typing import Any

import psutil


def memory_shares(device: Any) -> list[float]:
    """The host's memory in use, and the CUDA device's, from 0 to 1. What torch has only reserved counts as free."""
    shares = [float(psutil.virtual_memory().percent) / 100]
    if device is not None:
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        shares.append(torch.cuda.memory_allocated(device) / total)
    return shares
