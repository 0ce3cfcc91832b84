"""The interface of snapshot stores, and `open_store`. Ours are files in stores/; others are added by `add_store`.

A store is used from one background thread. It may raise; the caller reports the error, and training continues.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from sonde.errors import UnknownNameError, UsageError, nearest
from sonde.schema.snapshots.tensors import Receipt, Snapshot

__all__ = ["Receipt", "Store", "add_store", "check_store", "known_stores", "open_store"]

GROUP: Final = "sonde.stores"
"""The group of entry points in which other packages register the `open` function of a store."""
Opener = Callable[..., "Store"]
_added: Final[dict[str, Opener]] = {}


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


def add_store(name: str, open: Opener) -> None:
    """Make a store available to this process: `open(run, **options)` opens it in the folder of a run.

    sonde.write.add_store("mine", MyStore)
    sonde.watch(model, snapshots=sonde.Snapshots(store="mine"))

    A package registers its store for every process instead: as an entry point of the group `sonde.stores`.
    """
    if name in _own_stores() or not name.isidentifier():
        raise UsageError(f"a store cannot be named {name!r}. Names of sonde's own: {', '.join(_own_stores())}.")
    _added[name] = open


def known_stores() -> list[str]:
    """The available stores: ours by the names of their files, and those of others."""
    return sorted({*_own_stores(), *_added, *(entry.name for entry in entry_points(group=GROUP))})


def _own_stores() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "stores")]))


def open_store(kind: str, run: Path, options: Mapping[str, Any] | None = None) -> Store:
    """Open the store of a run: "zarr", "icechunk", "memory", the URL of a bucket ("s3://bucket/prefix"), or an added
    one.

    Raises here, before training starts, if the store type is unknown, an option is invalid or a package is missing.
    """
    given = dict(options or {})
    if "://" in kind:
        given["url"] = kind
        kind = "cloud"
    elif kind == "cloud" or kind not in known_stores():
        named = [name for name in known_stores() if name != "cloud"]  # that one is named by its URL
        raise UnknownNameError("store", kind, [*named, "s3://…", "gs://…", "az://…"])
    opener, known = _opener(kind)
    for name in given.keys() - {"url", "rank"} - set(known):
        near, names = nearest(name, known), ", ".join(known) or "none"
        raise UsageError(f'the store "{kind}" has no option "{name}".{near} Known: {names}.')
    return opener(Path(run), **given)


def check_store(kind: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise what `open_store` would raise, without a run: the store is opened in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="sonde-") as folder:
        open_store(kind, Path(folder), options).close()


def _opener(kind: str) -> tuple[Opener, list[str]]:
    """The function that opens a store, and its options: its module's `OPTIONS`, or its keywords."""
    named: Iterable[str] | None = None
    if kind in _own_stores():
        module = importlib.import_module(f"sonde.write.tensors.stores.{kind}")
        opener, named = module.open, getattr(module, "OPTIONS", None)
    elif kind in _added:
        opener = _added[kind]
    else:
        opener = next(iter(entry_points(group=GROUP, name=kind))).load()
    if named is None:
        named = [p.name for p in inspect.signature(opener).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return opener, sorted(set(named) - {"url", "rank"})
