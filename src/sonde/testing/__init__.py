"""Public helpers for testing sonde and what is built on it: models that trip an observer, a hash of every bit, and the
suite that every store passes."""

from __future__ import annotations

from typing import Any

__all__ = ["StoreTests"]


def __getattr__(name: str) -> Any:
    """`StoreTests` needs pytest, which `sonde.testing.faults` does not."""
    if name == "StoreTests":
        from sonde.testing.stores import StoreTests

        return StoreTests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
