"""The sections of the standard report, each from what was recorded. A section with nothing to go on says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import UnknownNameError
from sonde.read.analysis.difference import difference
from sonde.read.checkpoints import Checkpoint
from sonde.run import Run
from sonde.schema.sketch import Array
from sonde.tune.charts import thinned
from sonde.tune.report import Section

_NOTHING: Final = "Not recorded."
_MIN_POINTS: Final = 8
_LEVEL: Final = 0.02
"""A loss that moved less than this share of its fall in the last third has levelled off."""
_SURE: Final = 2.0
"""Standard errors beyond which a change is one: the loss of a batch goes up and down by itself."""
_RUNAWAY: Final = 1.5
Columns = tuple[NDArray[np.int64], Array]


def convergence_section(run: Run | None) -> Section:
    """Has the training loss come down, and is it still coming down?"""
    title = "Convergence"
    steps, loss = _column(run, ("loss", "train_loss", "train/loss"))
    if len(loss) < _MIN_POINTS:
        return Section(title, _NOTHING if len(loss) == 0 else f"Too short to say: {len(loss)} values of the loss.")
    third = max(len(loss) // 3, 2)
    first, middle, last = (float(np.median(part)) for part in (loss[:third], loss[third:-third], loss[-third:]))
    few = third // 3 + 1
    start, end = float(np.median(loss[:few])), float(np.median(loss[-few:]))
    slope, slope_error, noise = _line(loss[-third:])
    fall, least = start - end, max(_LEVEL * (start - end), _SURE * slope_error)
    if not math.isfinite(end):
        verdict = "Diverged: the loss is no longer a number."
    elif end > _RUNAWAY * loss[0] > 0:
        verdict = f"Diverged: the loss is {end:.4g}, and it began at {loss[0]:.4g}."
    elif fall <= 0:
        verdict = f"Not converging: the loss went from {start:.4g} to {end:.4g}."
    elif fall < _SURE * noise * math.sqrt(2 / few):
        verdict = f"Not converging: the loss went from {start:.4g} to {end:.4g}, no further than it varies."
    elif abs(slope) <= least:
        verdict = f"Converged: the loss fell from {start:.4g} to {end:.4g} and has levelled off."
    elif slope < 0:
        verdict = f"Still learning: the loss fell from {start:.4g} to {end:.4g} and is falling."
    else:
        verdict = f"Turned: the loss fell from {start:.4g} and has been rising again, to {end:.4g}."
    best = int(np.nanargmin(loss)) if np.isfinite(loss).any() else 0
    facts = {
        "first": start,
        "last": end,
        "lowest": float(loss[best]),
        "lowest at step": int(steps[best]),
        "thirds": f"{first:.4g}, {middle:.4g}, {last:.4g}",
        "change in the last third": slope,
    }
    return Section(title, verdict, facts, curves={"training loss": thinned(steps.tolist(), loss.tolist())})


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


def overfitting_section(run: Run | None, checkpoints: Sequence[Checkpoint]) -> Section:
    """Does held-out data agree with what training says?"""
    title = "Overfitting"
    steps, held_out = _column(run, ("eval_loss", "val_loss", "val/loss", "eval/loss"))
    train_steps, loss = _column(run, ("loss", "train_loss", "train/loss"))
    if len(held_out) < 2:
        return Section(title, "No held-out data was evaluated; give eval_dataset=.")
    best = int(np.nanargmin(held_out)) if np.isfinite(held_out).any() else 0
    train = float(np.median(loss[-max(len(loss) // 10, 1) :])) if len(loss) else math.nan
    gap = float(held_out[-1]) / train if train > 0 else math.nan
    rise = float(held_out[-1] / held_out[best]) if held_out[best] > 0 else math.nan
    finding = next((f for f in run.findings() if f.rule == "overfitting"), None) if run is not None else None
    if finding is not None:
        verdict = f"Overfitting: {finding.message}."
    elif rise > 1.02 and best < len(held_out) - 1:
        verdict = f"Held-out loss was best at step {steps[best]} and is {rise - 1:.1%} above it now."
    else:
        verdict = f"No sign of overfitting: held-out loss is {held_out[-1]:.4g}, training loss {train:.4g}."
    kept = [checkpoint.step for checkpoint in checkpoints]
    near = min(kept, key=lambda step: abs(step - 1 - int(steps[best])), default=None)
    facts = {
        "held-out over training loss": gap,
        "best held-out loss": float(held_out[best]),
        "best at step": int(steps[best]),
        "checkpoint nearest to it": near,
    }
    curves = {"training loss": thinned(train_steps.tolist(), loss.tolist())} if len(loss) else {}
    return Section(
        title, verdict, facts, curves={**curves, "held-out loss": thinned(steps.tolist(), held_out.tolist())}
    )


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


def _line(values: Array) -> tuple[float, float, float]:
    """Change along a straight line through them, its standard error, and how much they scatter around it."""
    x = np.linspace(-0.5, 0.5, len(values))
    if not np.isfinite(values).all():
        return math.nan, math.nan, math.nan
    slope = float(x @ (values - values.mean()) / (x @ x))
    rest = values - values.mean() - slope * x
    noise = float(np.sqrt(rest @ rest / max(len(values) - 2, 1)))
    return slope, noise / math.sqrt(float(x @ x)), noise


def _column(run: Run | None, names: Sequence[str]) -> Columns:
    """Steps and values of the first of these scalars that was logged."""
    for name in names if run is not None else ():
        assert run is not None
        table = _scalars(run, name)
        if table is not None and table.num_rows:
            return np.asarray(table.column("step")), np.asarray(table.column("value"), np.float64)
    return np.empty(0, np.int64), np.empty(0)


def _scalars(run: Run, pattern: str) -> Any:
    """None where nothing of that name was logged."""
    try:
        return run.scalars(pattern)
    except UnknownNameError:
        return None
