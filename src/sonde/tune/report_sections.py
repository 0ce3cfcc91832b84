"""The sections of the standard report, each from what was recorded. A section with nothing to go on says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from sonde.errors import UnknownNameError
from sonde.read.run.checkpoints import Checkpoint
from sonde.read.tensors.analysis.difference import difference
from sonde.run import Run
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from sonde.show.report.analysis import Analysis
from sonde.show.report.convergence import convergence
from sonde.show.report.overfitting import overfitting
from sonde.tune.charts import thinned
from sonde.tune.report import Section

_NOTHING: Final = "Not recorded."


def convergence_section(window: Window | None) -> Section:
    """Has the training loss come down, and is it still coming down? In the words of `sonde report`."""
    if window is None:
        return Section("Convergence", _NOTHING)
    return _section("Convergence", convergence(window))


def gradient_section(run: Run | None) -> Section:
    """How large are gradients along the depth, and did any stop?"""
    title = "Gradient flow"
    if run is None:
        return Section(title, _NOTHING)
    table = run.stats("grad/*/norm")
    norms: dict[str, list[float]] = {}
    for site, value in zip(table.column("site").to_pylist(), table.column("value").to_pylist(), strict=True):
        norms.setdefault(site, []).append(value)
    if not norms:
        return Section(title, _NOTHING)
    rows: list[dict[str, Any]] = [
        {
            "layer": site,
            "median norm": float(np.nanmedian(values)),
            "largest": float(np.nanmax(values)),
            "zero in": f"{np.mean(np.asarray(values) == 0):.0%}",
        }
        for site, values in norms.items()
        if np.isfinite(values).any()
    ]
    medians = np.array([row["median norm"] for row in rows if row["median norm"] > 0])
    silent = [row["layer"] for row in rows if row["median norm"] == 0]
    spread = float(medians.max() / medians.min()) if len(medians) else math.nan
    verdict = f"Gradients reach {len(medians)} of {len(rows)} layers; the largest is {spread:.3g} times the smallest."
    if silent:
        verdict += f" Without gradient: {', '.join(silent[:3])}{' …' if len(silent) > 3 else ''}."
    facts = {"spread": spread, "without gradient": len(silent)}
    return Section(title, verdict, facts, sorted(rows, key=lambda row: -row["median norm"]), drawn="median norm")


def weight_section(found: Iterable[tuple[int, Mapping[str, Any]]]) -> Section:
    """How far have the weights moved from the first checkpoint, and between one and the next?"""
    title = "Weight evolution"
    start: Mapping[str, Any] | None = None
    before: Mapping[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    furthest: dict[str, float] = {}
    for step, tensors in found:
        start, before = start or tensors, before or tensors
        total = _total(start, tensors)
        newest = _total(before, tensors)
        rows.append({
            "step": step,
            "norm": math.sqrt(sum(float(np.sum(np.square(_floats(t)))) for t in tensors.values())),
            "from the first": total.relative,
            "since the last": newest.relative,
            "cosine with the first": total.cosine,
        })  # fmt: skip
        furthest = {name: difference(_floats(start[name]), _floats(tensors[name])).relative for name in start}
        before = tensors
    if len(rows) < 2:
        return Section(title, "Too few checkpoints to compare." if rows else "No checkpoints.", rows=rows)
    top = sorted(furthest.items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -1e300)[:5]
    first, last = rows[0], rows[-1]
    moved = last["from the first"]
    verdict = f"From step {first['step']} to {last['step']} the weights moved by {moved:.3g} of their size."
    facts = {"moved most": ", ".join(f"{name} ({value:.3g})" for name, value in top)}
    saved = [row["step"] for row in rows]
    curves = {name: thinned(saved, [row[name] for row in rows]) for name in ("from the first", "since the last")}
    return Section(title, verdict, facts, rows, curves)


def overfitting_section(window: Window | None, checkpoints: Sequence[Checkpoint]) -> Section:
    """Does held-out data agree with what training says? In the words of `sonde report`, with the checkpoint to take."""
    if window is None:
        return Section("Overfitting", _NOTHING)
    found = overfitting(window)
    section = _section("Overfitting", found)
    best = section.facts.get("best step")
    if best is not None:
        kept = [checkpoint.step for checkpoint in checkpoints]
        section.facts["checkpoint nearest to it"] = min(kept, key=lambda step: abs(step - 1 - best), default=None)
    return section


def _section(title: str, found: Analysis) -> Section:
    facts = {one.name: one.value for one in found.quantities if one.value is not None}
    lines = [line for chart in found.charts[:1] for line in chart.lines]
    curves = {line.name: thinned(line.x.tolist(), line.y.tolist()) for line in lines}
    return Section(title, found.verdict, facts, curves=curves)


def adapter_section(run: Run) -> Section | None:
    """What low-rank adapters have become; None where there are none."""
    table = _scalars(run, "unit/*/adapter_*")
    if table is None:
        return None
    latest: dict[str, dict[str, float]] = {}
    for name, value in zip(table.column("name").to_pylist(), table.column("value").to_pylist(), strict=True):
        _, site, stat = name.split("/")
        latest.setdefault(site, {})[stat.removeprefix("adapter_")] = value
    rows: list[dict[str, Any]] = [
        {"adapter": site, **_rounded(stats)} for site, stats in latest.items() if "rank" in stats
    ]
    if not rows:
        return None
    dead = [row["adapter"] for row in rows if row.get("dead") == 1.0]
    drift = np.array([row["drift"] for row in rows])
    verdict = f"{len(rows)} adapters; their weights drifted by {np.nanmedian(drift):.3g} of the base weights (median)."
    if dead:
        verdict += f" Dead: {', '.join(dead[:3])}{' …' if len(dead) > 3 else ''}."
    facts = {"median effective rank": float(np.nanmedian([row["rank"] for row in rows])), "dead": len(dead)}
    return Section("Adapters", verdict, facts, sorted(rows, key=lambda row: -row["drift"]), drawn="drift")


def _rounded(stats: Mapping[str, float]) -> dict[str, float]:
    return {name: stats.get(name, math.nan) for name in ("norm", "rank", "drift", "change", "a_norm", "b_norm", "dead")}


def _total(then: Mapping[str, Any], now: Mapping[str, Any]) -> Any:
    parts = [difference(_floats(then[name]), _floats(now[name])) for name in now if name in then]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _floats(tensor: Any) -> Array:
    return np.asarray(tensor).astype(np.float64)


def _scalars(run: Run, pattern: str) -> Any:
    """None where nothing of that name was logged."""
    try:
        return run.scalars(pattern)
    except UnknownNameError:
        return None
