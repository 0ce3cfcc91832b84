"""The interface of snapshot stores, and `open_store`. To add a store, add a file to stores/.

A store is used from one background thread. It may raise; the caller reports the error, and training continues.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from sonde.errors import UnknownNameError, UsageError, nearest
from sonde.schema.snapshots.tensors import Receipt, Snapshot

__all__ = ["Receipt", "Store", "check_store", "known_stores", "open_store"]


@runtime_checkable
class Store(Protocol):
    """Snapshots by attempt and step. A store must pass `sonde.testing.StoreTests`."""

    def write(self, snapshot: Snapshot) -> Receipt:
        """Store a snapshot: durable and visible when this returns, all of it or none. Each step is written once per
        attempt."""
        ...

    def attempts(self) -> list[int]:
        """The attempts that have a snapshot, in order."""
        ...

    def steps(self, attempt: int = 0) -> list[int]:
        """The readable steps of an attempt, in order."""
        ...

    def read(self, step: int, names: Iterable[str] | None = None, *, attempt: int = 0) -> Snapshot:
        """A snapshot, or some tensors of it, bit by bit as it was written."""
        ...

    def delete(self, step: int, *, attempt: int = 0) -> None:
        """Delete a snapshot; every other one stays readable."""
        ...

    def close(self) -> None:
        """Release files, locks and processes. May be called twice."""
        ...


def known_stores() -> list[str]:
    """The available stores, by the names of their files."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "stores")]))


def open_store(kind: str, run: Path, options: Mapping[str, Any] | None = None) -> Store:
    """Open the store of a run: "zarr", "icechunk", "memory", or the URL of a bucket ("s3://bucket/prefix").

    Raises here, before training starts, if the store type is unknown, an option is invalid or a package is missing.
    """
    given = dict(options or {})
    if "://" in kind:
        given["url"] = kind
        kind = "cloud"
    elif kind == "cloud" or kind not in known_stores():
        named = [name for name in known_stores() if name != "cloud"]  # that one is named by its URL
        raise UnknownNameError("store", kind, [*named, "s3://…", "gs://…", "az://…"])
    module = importlib.import_module(f"sonde.write.tensors.stores.{kind}")
    known = store_options(module)
    for name in given.keys() - {"url", "rank"} - set(known):
        near, names = nearest(name, known), ", ".join(known) or "none"
        raise UsageError(f'the store "{kind}" has no option "{name}".{near} Known: {names}.')
    store: Store = module.open(Path(run), **given)
    return store


def check_store(kind: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise what `open_store` would raise, without a run: the store is opened in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="sonde-") as folder:
        open_store(kind, Path(folder), options).close()


def store_options(module: ModuleType) -> list[str]:
    """The options of a store: its `OPTIONS`, or the keywords of its `open`."""
    named = getattr(module, "OPTIONS", None)
    if named is None:
        named = [p.name for p in inspect.signature(module.open).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return sorted(set(named) - {"url", "rank"})
