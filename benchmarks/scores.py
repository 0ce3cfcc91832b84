"""Scores of findings against labels, with 95 % intervals from a bootstrap over programs. Knows no rule."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

NUM_RESAMPLES: Final = 1000
NO_EFFECT: Final = 0.05
"""A fault that costs less than this fraction of the twin's progress did no visible harm for this seed."""
LEARNED: Final = 0.25
"""The score, from 0 (chance) to 1 (perfect), that a program without a fault has to reach: else it is not healthy."""
LEAKED_MIB: Final = 1.0
"""Memory kept alive that counts as a leak, in programs whose whole model is smaller than that."""
BINS: Final = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01)


@dataclass
class Row:
    """One run and what was named. `named` has the warnings that nothing explains away, the first first."""

    id: str
    kind: str
    """faulty, twin or healthy"""
    labels: list[str]
    also: list[str]
    named: list[str]
    roots: list[str]
    """Those of `named` that no other finding explains."""
    confidence: list[float]
    """Of each of `roots`."""
    fault: str
    architecture: str
    task: str
    optimizer: str
    style: str
    held_out: bool
    level: int = 0
    named_at: int | None = None
    others: dict[str, list[str]] | None = None
    """What each published rule set names."""

    @property
    def is_detected(self) -> bool:
        return bool(self.named)

    @property
    def is_diagnosed(self) -> bool:
        return bool(set(self.named) & set(self.labels))

    @property
    def is_root_first(self) -> bool:
        return bool(self.named) and self.named[0] in self.labels


def progress(outcome: dict[str, Any]) -> float:
    """Mean score over the run and at its end: a model that learns late, or forgets, has learned less."""
    scores = outcome["scores"] or [-1.0]
    return 0.5 * (sum(scores) / len(scores) + scores[-1])


def is_healthy(outcome: dict[str, Any]) -> bool:
    """Whether a program without a fault learned its task."""
    return bool(np.isfinite(outcome["final_loss"])) and outcome["scores"][-1] > LEARNED


def had_effect(measure: str, faulty: dict[str, Any], twin: dict[str, Any]) -> bool:
    """Whether a fault did harm, judged by outcomes alone."""
    if measure == "always" or not np.isfinite(faulty["final_loss"]):
        return True
    if measure == "memory":
        return bool(faulty["kept_mib"] > LEAKED_MIB + twin["kept_mib"])
    own, other = progress(faulty), progress(twin)
    if measure == "gain":
        return own > other + NO_EFFECT
    return own < other - NO_EFFECT * max(other, LEARNED)


Measure = Callable[[Sequence[Row]], float]


def share(rows: Sequence[Row], holds: Callable[[Row], Any]) -> float:
    return sum(bool(holds(row)) for row in rows) / len(rows) if rows else float("nan")


def interval(rows: Sequence[Row], measure: Measure) -> tuple[float, float, float]:
    """A measure, and its 95 % interval over resampled programs."""
    if not rows:
        return (float("nan"),) * 3
    random = np.random.default_rng(0)
    picks = random.integers(len(rows), size=(NUM_RESAMPLES, len(rows)))
    values = [measure([rows[i] for i in pick]) for pick in picks]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return measure(rows), float(low), float(high)


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """All scores of a set of rows, each as (value, low, high)."""
    faulty, twins, healthy = (by_kind(rows, kind) for kind in ("faulty", "twin", "healthy"))
    precision = interval(rows, _precision)
    diagnosis = interval(faulty, lambda r: share(r, lambda row: row.is_diagnosed))
    delays = sorted(row.named_at for row in faulty if row.named_at is not None)
    return {
        "faulty": len(faulty),
        "twins": len(twins),
        "healthy": len(healthy),
        "detection": interval(faulty, lambda r: share(r, lambda row: row.is_detected)),
        "diagnosis": diagnosis,
        "root first": interval(faulty, lambda r: share(r, lambda row: row.is_root_first)),
        "false alarms, healthy": interval(healthy, lambda r: share(r, lambda row: row.is_detected)),
        "false alarms, twins": interval(twins, lambda r: share(r, lambda row: row.is_detected)),
        "label precision": precision,
        "F1": interval(rows, _f1),
        "median steps until named": delays[len(delays) // 2] if delays else None,
    }


def by_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row.kind == kind]


def _precision(rows: Sequence[Row]) -> float:
    good = bad = 0
    for row in rows:
        known = {*row.labels, *row.also}
        good += sum(name in known for name in row.named)
        bad += sum(name not in known for name in row.named) if row.kind != "twin" else 0
    return good / max(good + bad, 1)


def _f1(rows: Sequence[Row]) -> float:
    precision, recall = _precision(rows), share(by_kind(rows, "faulty"), lambda row: row.is_diagnosed)
    return 2 * precision * recall / max(precision + recall, 1e-9)


def calibration(rows: Sequence[Row]) -> dict[str, Any]:
    """How often a root cause is right, by the confidence that was stated, and the expected calibration error.

    A root is right if it is an acceptable cause or a true symptom of the fault; on a healthy program it is wrong.
    """
    stated = [
        (c, name in {*row.labels, *row.also}) for row in rows for name, c in zip(row.roots, row.confidence, strict=True)
    ]
    table, error = [], 0.0
    for low, high in itertools.pairwise(BINS):
        inside = [(c, right) for c, right in stated if low <= c < high]
        if inside:
            mean, right = float(np.mean([c for c, _ in inside])), float(np.mean([r for _, r in inside]))
            error += len(inside) / len(stated) * abs(mean - right)
            table.append({"from": low, "to": min(high, 1.0), "findings": len(inside), "stated": mean, "right": right})
    return {"table": table, "expected calibration error": error, "findings": len(stated)}


def grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, dict[str, Any]]:
    """The main scores of each group of rows."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return {name: _brief(group) for name, group in sorted(groups.items())}


def _brief(rows: Sequence[Row]) -> dict[str, Any]:
    faulty, quiet = by_kind(rows, "faulty"), [row for row in rows if row.kind != "faulty"]
    return {
        "faulty": len(faulty),
        "diagnosis": share(faulty, lambda row: row.is_diagnosed),
        "root first": share(faulty, lambda row: row.is_root_first),
        "without fault": len(quiet),
        "false alarms": share(quiet, lambda row: row.is_detected),
    }


def by_rule(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """For each rule: how often its root findings are right, and with what confidence it stated them."""
    found: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for row in rows:
        for name, stated in zip(row.roots, row.confidence, strict=True):
            found[name].append((stated, name in {*row.labels, *row.also}))
    return {
        name: {
            "findings": len(all_),
            "right": float(np.mean([r for _, r in all_])),
            "stated": float(np.mean([c for c, _ in all_])),
        }
        for name, all_ in sorted(found.items())
    }


def as_rule_set(rows: Sequence[Row], name: str) -> list[Row]:
    """The same rows as a published rule set answers them."""
    from dataclasses import replace

    return [
        replace(row, named=(row.others or {}).get(name, []), roots=[], confidence=[], named_at=None) for row in rows
    ]
