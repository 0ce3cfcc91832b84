"""Fine-tuning with everything recorded, and checkpoints from which a run resumes bit by bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.read.run.checkpoints import Checkpoint
    from sonde.show.report.standard import StandardReport
    from sonde.tune.analyzer import CheckpointAnalyzer
    from sonde.tune.checkpoint.loader import ResumableLoader
    from sonde.tune.checkpoint.manager import CheckpointManager
    from sonde.tune.checkpoint.storage import LocalStorage, Payload, StorageBackend
    from sonde.tune.config import MethodConfig, ModelConfig, load_config
    from sonde.tune.example import EXAMPLE
    from sonde.tune.live import LiveAnalyzer
    from sonde.tune.method import FineTuningMethod
    from sonde.tune.train.data import generate
    from sonde.tune.train.wrapper import TrainingResult, TrainingWrapper

__all__ = [
    "EXAMPLE",
    "Checkpoint",
    "CheckpointAnalyzer",
    "CheckpointManager",
    "FineTuningMethod",
    "LiveAnalyzer",
    "LocalStorage",
    "MethodConfig",
    "ModelConfig",
    "Payload",
    "ResumableLoader",
    "StandardReport",
    "StorageBackend",
    "TrainingResult",
    "TrainingWrapper",
    "generate",
    "load_config",
]

_HOME_OF = {
    "EXAMPLE": "sonde.tune.example",
    "Checkpoint": "sonde.read.run.checkpoints",
    "CheckpointAnalyzer": "sonde.tune.analyzer",
    "CheckpointManager": "sonde.tune.checkpoint.manager",
    "FineTuningMethod": "sonde.tune.method",
    "LiveAnalyzer": "sonde.tune.live",
    "LocalStorage": "sonde.tune.checkpoint.storage",
    "MethodConfig": "sonde.tune.config",
    "ModelConfig": "sonde.tune.config",
    "Payload": "sonde.tune.checkpoint.storage",
    "ResumableLoader": "sonde.tune.checkpoint.loader",
    "StandardReport": "sonde.show.report.standard",
    "StorageBackend": "sonde.tune.checkpoint.storage",
    "TrainingResult": "sonde.tune.train.wrapper",
    "TrainingWrapper": "sonde.tune.train.wrapper",
    "generate": "sonde.tune.train.data",
    "load_config": "sonde.tune.config",
}


def __getattr__(name: str) -> Any:
    """Each name is loaded on first use: managing checkpoints does not import transformers."""
    if name not in _HOME_OF:
        from sonde.errors import no_attribute

        raise no_attribute(__name__, name, __all__)
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
