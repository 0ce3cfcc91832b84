"""What happened once in a run, by its type. A run folder may come from anywhere: what is malformed is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sonde.schema.window import Window


class Happening(NamedTuple):
    """A step, and what is known of it."""

    step: int
    details: Mapping[str, Any]


def happenings(window: Window, type: str) -> list[Happening]:
    """Events of a type, in the order in which they were written; those without a step are of no use to a rule."""
    found = []
    for event in window.facts.get("events") or ():
        step, details = event.get("step"), event.get("details")
        if event.get("type") == type and isinstance(step, int):
            found.append(Happening(step, details if isinstance(details, Mapping) else {}))
    return found


def number(details: Mapping[str, Any], name: str, default: float) -> float:
    """A number of an event; the default where it is missing or something else."""
    value = details.get(name)
    return value if isinstance(value, int | float) else default
