"""Recognises Keras models, and finds the adapter that records them. Imports neither Keras nor torch."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

from sonde.distribution import DISTRIBUTION
from sonde.errors import UsageError


def is_keras(model_class: type) -> bool:
    """Check without importing it."""
    return any(c.__name__ == "Model" and c.__module__.partition(".")[0] == "keras" for c in model_class.__mro__)


def is_fitted(model: Any, optimizer: object) -> bool:
    """Whether a model is a Keras model that `fit` trains. On torch, one that is not compiled, or is watched with an
    optimizer of torch, is trained by a loop of the user's and watched like any other module."""
    if not is_keras(type(model)):
        return False
    if "torch" not in sys.modules or not hasattr(model, "named_modules"):
        return True
    return bool(getattr(model, "compiled", False)) and not hasattr(optimizer, "param_groups")


def keras_adapter() -> Any:
    """Adapters are plugins: this package must not import them."""
    for entry in entry_points(group="sonde.recorders", name="keras"):
        return entry.load()
    raise UsageError(
        f"the Keras adapter is not installed. Reinstall sonde:  pip install --force-reinstall --no-deps {DISTRIBUTION}"
    )
