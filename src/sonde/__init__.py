"""The public names of sonde, loaded on first use: `import sonde` alone imports nothing else.

import sonde

with sonde.watch(model, optimizer):
    train()
run = sonde.open("latest")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.config import Settings
    from sonde.probe.schedule import every, first
    from sonde.run import Run, compare, open, runs
    from sonde.session import Session, Snapshots, batch, finish, init, log, record, rewind, snapshot, step, tap, watch

    __version__: str

__all__ = [
    "Run",
    "Session",
    "Settings",
    "Snapshots",
    "batch",
    "compare",
    "every",
    "finish",
    "first",
    "init",
    "log",
    "open",
    "record",
    "rewind",
    "runs",
    "snapshot",
    "step",
    "tap",
    "watch",
]

_HOMES = {
    "sonde.config": ("Settings",),
    "sonde.probe.schedule": ("every", "first"),
    "sonde.run": ("Run", "compare", "open", "runs"),
    "sonde.session": (
        "Session",
        "Snapshots",
        "batch",
        "finish",
        "init",
        "log",
        "record",
        "rewind",
        "snapshot",
        "step",
        "tap",
        "watch",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("sonde")
    if name == "jax":
        return import_module("sonde.adapters.jax")
    if name == "flow":  # a room of its own, reached by its name
        return import_module("sonde.flow")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sonde' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
