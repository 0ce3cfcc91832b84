"""Test suites for authors of extensions, one for each extension point. Our own implementations pass the same suites."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sonde.testing.adapters import AdapterTests, TruthTests
    from sonde.testing.by_hand import Recipe
    from sonde.testing.checkpoints import StorageBackendTests
    from sonde.testing.methods import MethodTests
    from sonde.testing.mirrors import MirrorTests
    from sonde.testing.rules import RuleTests, window_of
    from sonde.testing.stores import StoreTests

_SUITES: Final = {
    "AdapterTests": "sonde.testing.adapters",
    "MethodTests": "sonde.testing.methods",
    "MirrorTests": "sonde.testing.mirrors",
    "Recipe": "sonde.testing.by_hand",
    "RuleTests": "sonde.testing.rules",
    "StorageBackendTests": "sonde.testing.checkpoints",
    "StoreTests": "sonde.testing.stores",
    "TruthTests": "sonde.testing.adapters",
    "window_of": "sonde.testing.rules",
}
__all__ = [
    "AdapterTests",
    "MethodTests",
    "MirrorTests",
    "Recipe",
    "RuleTests",
    "StorageBackendTests",
    "StoreTests",
    "TruthTests",
    "window_of",
]


def __getattr__(name: str) -> Any:
    """Import a suite when it is first used: suites need pytest."""
    if name in _SUITES:
        return getattr(import_module(_SUITES[name]), name)
    from sonde.errors import no_attribute

    raise no_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    return list(__all__)
