"""The events of a run, by type. A run folder may come from anywhere, so malformed events are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sonde.schema.window import Window


class Happening(NamedTuple):
    """One event: its step and its details."""

    step: int
    details: Mapping[str, Any]


def happenings(window: Window, type: str) -> list[Happening]:
    """Events of a type, in the order in which they were written; those without a step are skipped."""
    found = []
    for event in window.facts.get("events") or ():
        step, details = event.get("step"), event.get("details")
        if event.get("type") == type and isinstance(step, int):
            found.append(Happening(step, details if isinstance(details, Mapping) else {}))
    return found


def number(details: Mapping[str, Any], name: str, default: float) -> float:
    """A number from an event's details; the default if it is missing or not a number."""
    value = details.get(name)
    return value if isinstance(value, int | float) else default
