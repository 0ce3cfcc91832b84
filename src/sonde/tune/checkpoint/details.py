"""What a checkpoint says about the process that saved it."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch


def describe(reason: str, *, adapters_only: bool) -> dict[str, Any]:
    """Versions and settings on which the next bits depend."""
    return {
        "reason": reason,
        "adapters_only": adapters_only,
        "sonde": version("sonde"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
