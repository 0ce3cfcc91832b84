"""Analyses of checkpoints: how far weights moved between them, which one to use, and how adapters changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from sonde.errors import UnknownNameError
from sonde.run import Run, difference
from sonde.schema.sketch import Array
from sonde.show.analyses.analysis import Analysis, Chart, Quantity, Table, line
from sonde.show.term.number import counted

NUM_NAMED: Final = 5
_COLUMNS: Final = ("step", "norm", "from the first", "since the last", "cosine with the first")
_ADAPTER: Final = ("norm", "rank", "drift", "change", "a_norm", "b_norm", "dead")


def weight_evolution(found: Iterable[tuple[int, Mapping[str, Any]]]) -> Analysis:
    """Analyze how far the weights moved from the first checkpoint, and from each one to the next."""
    start: Mapping[str, Any] | None = None
    before: Mapping[str, Any] | None = None
    rows: list[tuple[float, ...]] = []
    furthest: dict[str, float] = {}
    for step, tensors in found:
        start, before = start or tensors, before or tensors
        total, newest = _total(start, tensors), _total(before, tensors)
        norm = math.sqrt(sum(float(np.sum(np.square(_floats(tensor)))) for tensor in tensors.values()))
        rows.append((step, norm, total.relative, newest.relative, total.cosine))
        furthest = {name: difference(_floats(start[name]), _floats(tensors[name])).relative for name in start}
        before = tensors
    made = Analysis(
        key="weight_evolution",
        title="Weight evolution",
        tone="unknown",
        verdict="Too few checkpoints to compare." if rows else "No checkpoints.",
        tables=(Table("checkpoints", _COLUMNS, tuple(rows)),),
    )
    if len(rows) < 2:
        return made
    top = sorted(furthest.items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -1e300)[:NUM_NAMED]
    moved = f"From step {rows[0][0]} to {rows[-1][0]}, the weights changed by {rows[-1][2]:.3g} relative to their norm"
    verdict = f"{moved}, most in {', '.join(f'{name} ({value:.3g})' for name, value in top)}."
    columns = np.array(rows).T
    lines = tuple(line(_COLUMNS[place], columns[0].astype(np.int64), columns[place]) for place in (2, 3))
    chart = Chart(title="relative change of the weights", lines=lines)
    return replace(made, tone="good", verdict=verdict, charts=(chart,))


def with_checkpoint(overfitting: Analysis, saved: Sequence[int]) -> Analysis:
    """Add the checkpoint to use, if the best step is known."""
    best = overfitting.facts.get("best step")
    nearest = None if best is None else min(saved, key=lambda step: abs(step - 1 - best), default=None)
    if nearest is None:
        return overfitting
    found = Quantity("checkpoint nearest to it", nearest, "the checkpoint to use", is_step=True)
    return replace(overfitting, quantities=(*overfitting.quantities, found))


def adapters(run: Run) -> Analysis | None:
    """Analyze low-rank adapters; None if there are none."""
    try:
        logged = run.scalar_lines("unit/*/adapter_*")
    except UnknownNameError:
        return None
    latest: dict[str, dict[str, float]] = {}
    for name, (_, values) in logged.items():
        _, site, stat = name.split("/")
        latest.setdefault(site, {})[stat.removeprefix("adapter_")] = float(values[-1])
    found = {site: stats for site, stats in latest.items() if "rank" in stats}
    if not found:
        return None
    ordered = sorted(found, key=lambda site: -found[site].get("drift", math.nan))
    rows: list[tuple[str | float, ...]] = [
        (site, *(found[site].get(stat, math.nan) for stat in _ADAPTER)) for site in ordered
    ]
    dead = [site for site in found if found[site].get("dead") == 1.0]
    drift = np.nanmedian([stats.get("drift", math.nan) for stats in found.values()])
    verdict = (
        f"{counted(len(found), 'adapter')}. Median drift from the base weights: {drift:.3g} relative to their norm."
    )
    if dead:
        verdict += f" Dead: {', '.join(dead[:3])}{' …' if len(dead) > 3 else ''}."
    rank = float(np.nanmedian([stats["rank"] for stats in found.values()]))
    return Analysis(
        key="adapters",
        title="Adapters",
        tone="bad" if dead else "good",
        verdict=verdict,
        quantities=(
            Quantity("median effective rank", rank, "number of directions that an adapter uses, median of all"),
            Quantity("dead", len(dead), "adapters that never changed"),
        ),
        tables=(Table("adapters", ("adapter", *_ADAPTER), tuple(rows), drawn="drift"),),
    )


def _total(then: Mapping[str, Any], now: Mapping[str, Any]) -> Any:
    parts = [difference(_floats(then[name]), _floats(now[name])) for name in now if name in then]
    return sum(parts[1:], parts[0])


def _floats(tensor: Any) -> Array:
    return np.asarray(tensor).astype(np.float64)
