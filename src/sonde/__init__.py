"""Records what happens inside a neural network while it trains, and tells you what went wrong and how to fix it.

    with sonde.watch(model, optimizer):
        train()
    run = sonde.open("latest")
    run.findings()

Every name loads on first use: `import sonde` alone imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde import adapters as adapters
    from sonde import compat as compat
    from sonde import errors as errors
    from sonde import flow as flow
    from sonde import show as show
    from sonde import testing as testing
    from sonde import tune as tune
    from sonde.adapters import jax as jax
    from sonde.config import Settings
    from sonde.probe.schedule import every, first
    from sonde.run import Run, compare, open, runs
    from sonde.session import (
        Mirror,
        Session,
        Snapshots,
        batch,
        finish,
        init,
        log,
        record,
        rewind,
        snapshot,
        step,
        tap,
        watch,
    )
    from sonde.show.web.link import ui

    __version__: str

__all__ = [
    "Mirror",
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
    "ui",
    "watch",
]

_HOMES = {
    "sonde.config": ("Settings",),
    "sonde.probe.schedule": ("every", "first"),
    "sonde.run": ("Run", "compare", "open", "runs"),
    "sonde.session": (
        "Mirror",
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
    "sonde.show.web.link": ("ui",),
}
_MODULES = {
    "adapters": "sonde.adapters",
    "compat": "sonde.compat",
    "errors": "sonde.errors",
    "flow": "sonde.flow",
    "jax": "sonde.adapters.jax",
    "show": "sonde.show",
    "testing": "sonde.testing",
    "tune": "sonde.tune",
}
"""Public modules, reached as attributes."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from sonde.distribution import version

        return version()
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME_OF:
        from sonde.errors import no_attribute

        raise no_attribute(__name__, name, [*__all__, *_MODULES])
    began_s = perf_counter()
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    if _HOME_OF[name] == "sonde.session":  # what the import took is part of what recording takes
        import_module("sonde.budget.ledger").imports_s.append(perf_counter() - began_s)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
