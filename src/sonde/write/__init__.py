"""Writes sketches, scalars and events to disk, off the training thread. Never raises into it, never blocks it.

Public: `Store`, the interface of snapshot stores, and `open_store`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.write.tensors.store import Store, open_store

__all__ = ["Store", "open_store"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sonde.write.tensors import store

        return getattr(store, name)
    from sonde.errors import no_attribute

    raise no_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    return list(__all__)
