"""Writes sketches, scalars and events to disk, off the training thread. Never raises into it, never blocks it.

Public: `Store`, the interface of snapshot stores; `Snapshot`, `HostTensor` and `Receipt`, which it deals in;
`open_store` and `add_store`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.schema.snapshots.tensors import HostTensor, Receipt, Snapshot
    from sonde.write.tensors.store import Store, add_store, open_store

__all__ = ["HostTensor", "Receipt", "Snapshot", "Store", "add_store", "open_store"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sonde.schema.snapshots import tensors
        from sonde.write.tensors import store

        return getattr(store if hasattr(store, name) else tensors, name)
    from sonde.errors import no_attribute

    raise no_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    return list(__all__)
