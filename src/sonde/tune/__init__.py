"""Fine-tuning with everything recorded, and checkpoints that a run continues from bit by bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.tune.analyzer import CheckpointAnalyzer
    from sonde.tune.checkpoints import CheckpointManager
    from sonde.tune.live import LiveAnalyzer
    from sonde.tune.loader import ResumableLoader
    from sonde.tune.method import FineTuningMethod
    from sonde.tune.report import StandardReport
    from sonde.tune.storage import LocalStorage, StorageBackend
    from sonde.tune.wrapper import TrainingResult, TrainingWrapper

__all__ = [
    "CheckpointAnalyzer",
    "CheckpointManager",
    "FineTuningMethod",
    "LiveAnalyzer",
    "LocalStorage",
    "ResumableLoader",
    "StandardReport",
    "StorageBackend",
    "TrainingResult",
    "TrainingWrapper",
]

_HOME_OF = {
    "CheckpointAnalyzer": "sonde.tune.analyzer",
    "CheckpointManager": "sonde.tune.checkpoints",
    "FineTuningMethod": "sonde.tune.method",
    "LiveAnalyzer": "sonde.tune.live",
    "LocalStorage": "sonde.tune.storage",
    "ResumableLoader": "sonde.tune.loader",
    "StandardReport": "sonde.tune.report",
    "StorageBackend": "sonde.tune.storage",
    "TrainingResult": "sonde.tune.wrapper",
    "TrainingWrapper": "sonde.tune.wrapper",
}


def __getattr__(name: str) -> Any:
    """Each name is loaded on first use: managing checkpoints does not import transformers."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sonde.tune' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
