"""Public helpers for testing sonde and what is built on it: models that trip an observer, a hash of every bit, and the
suites that every store and every adapter of a trainer passes."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

_SUITES: Final = {
    "AdapterTests": "sonde.testing.adapters",
    "Recipe": "sonde.testing.by_hand",
    "StoreTests": "sonde.testing.stores",
    "TruthTests": "sonde.testing.adapters",
}
__all__ = ["AdapterTests", "Recipe", "StoreTests", "TruthTests"]


def __getattr__(name: str) -> Any:
    """Suites need pytest, which `sonde.testing.faults` does not."""
    if name in _SUITES:
        return getattr(import_module(_SUITES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
