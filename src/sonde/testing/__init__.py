"""Test suites for authors of extensions, which every store and every trainer integration must pass."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sonde.testing.adapters import AdapterTests, TruthTests
    from sonde.testing.by_hand import Recipe
    from sonde.testing.stores import StoreTests

_SUITES: Final = {
    "AdapterTests": "sonde.testing.adapters",
    "Recipe": "sonde.testing.by_hand",
    "StoreTests": "sonde.testing.stores",
    "TruthTests": "sonde.testing.adapters",
}
__all__ = ["AdapterTests", "Recipe", "StoreTests", "TruthTests"]


def __getattr__(name: str) -> Any:
    """Import a suite when it is first used: suites need pytest."""
    if name in _SUITES:
        return getattr(import_module(_SUITES[name]), name)
    from sonde.errors import no_attribute

    raise no_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    return list(__all__)
