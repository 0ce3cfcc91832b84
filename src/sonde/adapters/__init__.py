"""Integrations of sonde into other frameworks: one file per foreign package, named as it is imported."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.session.entry.trainer import TrainerMixin
    from sonde.session.observers.delivery import Sink
    from sonde.write.items import FindingRow

__all__ = [
    "FindingRow",
    "Sink",
    "TrainerMixin",
    "accelerate",
    "huggingface_hub",
    "jax",
    "keras",
    "lightning",
    "mlflow",
    "tensorboard",
    "trackio",
    "transformers",
    "wandb",
]

_HOME_OF = {
    "FindingRow": "sonde.write.items",
    "Sink": "sonde.session.observers.delivery",
    "TrainerMixin": "sonde.session.entry.trainer",
}


def __getattr__(name: str) -> Any:
    """Import an integration when it is first used: it needs its framework."""
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    from sonde.errors import no_attribute

    raise no_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    return list(__all__)
