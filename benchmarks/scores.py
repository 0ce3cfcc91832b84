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


def share(rows: Sequence[Row], holds: Callable[[Row], Any]) -> float:
    return sum(bool(holds(row)) for row in rows) / len(rows) if rows else float("nan")


Interval = tuple[float, float, float]
"""A value and its 95 % interval."""


def interval(columns: Sequence[Sequence[float]], measure: Callable[..., Any]) -> Interval:
    """A measure of the sums of some columns, with one entry per program, and its interval over resampled programs."""
    values = np.array(columns, float)
    num = values.shape[1]
    if not num:
        return (float("nan"),) * 3
    picks = np.random.default_rng(0).integers(num, size=(NUM_RESAMPLES, num))
    with np.errstate(all="ignore"):
        resampled = measure(*(column[picks].sum(1) for column in values))
        low, high = np.nanpercentile(resampled, [2.5, 97.5])
        return float(measure(*values.sum(1))), float(low), float(high)


def shares(rows: Sequence[Row], holds: Callable[[Row], Any]) -> Interval:
    """How often a claim holds, and its interval."""
    return interval([[bool(holds(row)) for row in rows], [1.0] * len(rows)], lambda true, all_: true / all_)


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """All scores of a set of rows, each as (value, low, high)."""
    faulty, twins, healthy = (by_kind(rows, kind) for kind in ("faulty", "twin", "healthy"))
    delays = sorted(row.named_at for row in faulty if row.named_at is not None)
    counts = [_counts(row) for row in rows]
    columns = [list(column) for column in zip(*counts, strict=True)] or [[]] * 4
    return {
        "faulty": len(faulty),
        "twins": len(twins),
        "healthy": len(healthy),
        "detection": shares(faulty, lambda row: row.is_detected),
        "diagnosis": shares(faulty, lambda row: row.is_diagnosed),
        "root first": shares(faulty, lambda row: row.is_root_first),
        "false alarms, healthy": shares(healthy, lambda row: row.is_detected),
        "false alarms, twins": shares(twins, lambda row: row.is_detected),
        "label precision": interval(columns, lambda good, bad, *_: good / (good + bad)),
        "F1": interval(columns, _f1),
        "median steps until named": delays[len(delays) // 2] if delays else None,
    }


def by_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row.kind == kind]


def _counts(row: Row) -> tuple[int, int, int, int]:
    """Names that are right, names that are wrong (not on twins), whether a root was found, whether there was one."""
    known = {*row.labels, *row.also}
    good = sum(name in known for name in row.named)
    bad = len(row.named) - good if row.kind != "twin" else 0
    return good, bad, row.is_diagnosed, row.kind == "faulty"


def _f1(good: Any, bad: Any, found: Any, faults: Any) -> Any:
    precision, recall = good / (good + bad), found / faults
    return 2 * precision * recall / (precision + recall)


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
