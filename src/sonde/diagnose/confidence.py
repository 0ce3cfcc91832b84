"""Calibrated confidence: how often findings of a rule were right on programs that its authors did not see.

`confidence.json` is the one table. For each rule it holds rows of (stated confidence, number of findings, number that
were right), and where they were counted. A rule without rows keeps the confidence that its author stated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Final

import numpy as np

PRIOR: Final = 4.0
"""Number of imagined findings that are right as often as stated: a few counted ones move the confidence only a
little."""
BIN: Final = 0.05
"""Stated confidences that are this close are counted together."""


@dataclass(frozen=True, slots=True)
class Row:
    """Findings of one rule with about the same stated confidence."""

    stated: float
    num: int
    num_right: int

    @property
    def measured(self) -> float:
        """The fraction that was right, drawn towards what was stated while there are few."""
        return (self.num_right + PRIOR * self.stated) / (self.num + PRIOR)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by rule, and where they were counted."""

    origin: str = ""
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)

    def calibrated(self, rule: str, stated: float) -> float:
        """The confidence of a finding: interpolated between the rows of its rule, constant outside of them."""
        rows = self.rows.get(rule, ())
        if not rows:
            return stated
        shifts = [row.measured - row.stated for row in rows]
        shift = float(np.interp(stated, [row.stated for row in rows], shifts))
        return min(max(stated + shift, 0.01), 1.0)

    def as_json(self) -> str:
        """The table as the file stores it."""
        rules = {name: [[row.stated, row.num, row.num_right] for row in rows] for name, rows in self.rows.items()}
        return json.dumps({"origin": self.origin, "rules": rules}, indent=1) + "\n"


def reliability(counted: Iterable[tuple[str, float, bool]], origin: str) -> Table:
    """The table of (rule, stated confidence, whether it was right) of findings on held-out programs.

    >>> table = reliability([("dead_relu", 0.8, True)] * 3 + [("dead_relu", 0.8, False)], "4 programs")
    >>> round(table.calibrated("dead_relu", 0.8), 3), table.calibrated("nan_inf", 0.9)
    (0.775, 0.9)
    """
    bins: dict[str, dict[int, list[tuple[float, bool]]]] = {}
    for rule, stated, is_right in counted:
        bins.setdefault(rule, {}).setdefault(round(stated / BIN), []).append((stated, is_right))
    rows = {
        rule: tuple(
            Row(round(float(np.mean([s for s, _ in found])), 4), len(found), sum(right for _, right in found))
            for _, found in sorted(own.items())
        )
        for rule, own in sorted(bins.items())
    }
    return Table(origin, rows)


@cache
def confidences() -> Table:
    """The table of this version."""
    file = files("sonde.diagnose") / "confidence.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    return Table(found["origin"], {name: tuple(Row(*row) for row in rows) for name, rows in found["rules"].items()})


def origin_in_words(rule: str) -> str:
    """Where the confidence of a rule's findings comes from, as a phrase."""
    rows = confidences().rows.get(rule, ())
    if not rows:
        return "stated by the rule's author, not measured"
    num, right = sum(row.num for row in rows), sum(row.num_right for row in rows)
    return f"calibrated: {right} of {num} findings were right on {confidences().origin}"
