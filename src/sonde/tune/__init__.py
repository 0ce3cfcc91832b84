"""Fine-tuning with everything recorded, and checkpoints that a run continues from bit by bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.tune.checkpoints import CheckpointManager
    from sonde.tune.loader import ResumableLoader
    from sonde.tune.storage import LocalStorage, StorageBackend

__all__ = [
    "CheckpointManager",
    "LocalStorage",
    "ResumableLoader",
    "StorageBackend",
]

_HOME_OF = {
    "CheckpointManager": "sonde.tune.checkpoints",
    "ResumableLoader": "sonde.tune.loader",
    "LocalStorage": "sonde.tune.storage",
    "StorageBackend": "sonde.tune.storage",
}


def __getattr__(name: str) -> Any:
    """Each name is loaded on first use: managing checkpoints does not import transformers."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sonde.tune' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
