"""Gradient flow: how gradients change through the layers, early and late in training, and the size of updates."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.run import Run
from sonde.show.analyses.analysis import Analysis, Chart, Floats, Line, Quantity, Table, Tone, known
from sonde.show.analyses.layers import Measured, early, first_odd, late, measure, middle, ratio
from sonde.show.term.number import counted

TITLE: Final = "Gradient flow"
UNEVEN: Final = 100.0
"""Ratio of the gradients of the first and the last third of the layers, either way, that is worth noting ..."""
BROKEN: Final = 1e4
"""... and the ratio at which learning has almost stopped at one end."""
UPDATE: Final = (1e-5, 1e-1)
"""Usual range of update norm / weight norm; the rule of thumb is about 1e-3."""


def gradient_flow(run: Run) -> Analysis:
    """Analyze gradients along the depth of the model."""
    grads = measure(run, "grad", ("rms", "norm"))
    if grads is None:
        verdict = "No gradients were recorded. Pass the optimizer too: sonde.watch(model, optimizer)."
        return Analysis(key="gradient_flow", title=TITLE, tone="unknown", verdict=verdict)
    updates = measure(run, "update", ("ratio",))
    begin, end = early(grads.stats["rms"].values), late(grads.stats["rms"].values)
    lean = _lean(end[grads.main()])
    size = np.nan if updates is None else middle(late(updates.stats["ratio"].values))
    tone, verdict = _judge(run, grads, lean, end, size)
    return Analysis(
        key="gradient_flow",
        title=TITLE,
        tone=tone,
        verdict=verdict,
        quantities=(
            Quantity(
                "lean", known(lean), "gradients of the first third of the layers divided by those of the last third"
            ),
            Quantity("spread", known(_spread(end[grads.main()])), "decades between the largest and the smallest layer"),
            Quantity("total, early", known(_total(grads, early)), "norm of all gradients, first quarter of the run"),
            Quantity("total, late", known(_total(grads, late)), "norm of all gradients, last quarter of the run"),
            Quantity("update ratio", known(size), "update norm / weight norm, median layer, last quarter of the run"),
            Quantity("zero", int((end == 0).sum()), "sites whose gradient is zero at the end"),
            Quantity("not finite", int(grads.is_odd.any(axis=1).sum()), "sites that ever had NaN or infinity"),
        ),
        charts=(_along_depth(grads, begin, end), _over_steps(grads)),
        tables=(_table(grads, begin, end, updates),),
    )


def _judge(run: Run, grads: Measured, lean: float, end: Floats, size: float) -> tuple[Tone, str]:
    odd = np.flatnonzero(grads.is_odd.any(axis=1))
    if len(odd):
        site, step = first_odd(run, "grad", grads)
        share = f"{len(odd)} of {counted(len(grads.sites), 'site')}"
        return "bad", f"Gradients became NaN or Inf at {share}, first in {site} at step {step:,}."
    words = f"gradients of the first layers are {_times(lean)} as large as those of the last"
    if np.isfinite(lean) and not 1 / BROKEN < lean < BROKEN:
        name = "vanish" if lean < 1 else "grow"
        return "bad", f"Gradients {name} towards the input: {words}."
    notes = []
    if (end == 0).any():
        zero = int((end == 0).sum())
        has = "has" if zero == 1 else "have"
        notes.append(f"{zero} of {counted(len(end), 'site')} {has} a gradient of exactly zero")
    if np.isfinite(size) and not UPDATE[0] < size < UPDATE[1]:
        notes.append(f"the ratio of updates to weights is {size:.1e} (usual: about 1e-3)")
    if np.isfinite(lean) and not 1 / UNEVEN < lean < UNEVEN:
        notes.append(words)
    if notes:
        return "watch", f"Gradients flow through all layers, but {' and '.join(notes)}."
    even = f": {words}" if np.isfinite(lean) else ""
    return "good", f"Gradients flow evenly through {counted(len(grads.sites), 'site')}{even}."


def _times(value: float) -> str:
    return f"{value:.3g} times" if value >= 0.01 else f"{value:.1e} times"


def _lean(profile: Floats) -> float:
    """Median of the first third of the layers divided by that of the last third."""
    known = profile[np.isfinite(profile) & (profile > 0)]
    if len(known) < 3:
        return np.nan
    third = max(len(known) // 3, 1)
    return float(np.median(known[:third]) / np.median(known[-third:]))


def _spread(profile: Floats) -> float:
    known = profile[np.isfinite(profile) & (profile > 0)]
    return float(np.log10(known.max() / known.min())) if len(known) else np.nan


def _total(grads: Measured, when: object) -> float:
    values = grads.stats["norm"].values
    total = np.sqrt(np.nansum(values**2, axis=0, keepdims=True))
    total[:, ~np.isfinite(values).any(axis=0)] = np.nan
    return float(when(total)[0]) if callable(when) else np.nan


def _along_depth(grads: Measured, begin: Floats, end: Floats) -> Chart:
    kept = np.flatnonzero(grads.main())
    place = np.arange(len(kept))
    return Chart(
        title="gradient rms along depth",
        lines=(Line("first quarter", place, begin[kept]), Line("last quarter", place, end[kept])),
        places=tuple(grads.sites[row] for row in kept),
        is_log=True,
    )


def _over_steps(grads: Measured) -> Chart:
    """The spread of the layers over time: median, minimum and maximum."""
    pooled = grads.stats["rms"]
    values = pooled.values[grads.main()]
    steps = np.array([pooled.column_step(column) for column in range(values.shape[1])], np.int64)
    some = np.isfinite(values).any(axis=0)
    steps, values = steps[some], values[:, some]
    lines = [Line(name, steps, function(values, axis=0)) for name, function in _LINES] if values.size else []
    return Chart(title="gradient rms of the layers over steps", lines=tuple(lines), is_log=True)


_LINES: Final = (("highest layer", np.nanmax), ("median layer", np.nanmedian), ("lowest layer", np.nanmin))


def _table(grads: Measured, begin: Floats, end: Floats, updates: Measured | None) -> Table:
    sizes = (
        {} if updates is None else dict(zip(updates.sites, late(updates.stats["ratio"].values).tolist(), strict=True))
    )
    change = ratio(end, begin)
    rows = [
        (site, float(begin[row]), float(end[row]), float(change[row]), sizes.get(site, np.nan))
        for row, site in enumerate(grads.sites)
    ]
    return Table(
        "layers", ("site", "rms, early", "rms, late", "late / early", "update / weight"), tuple(rows), "rms, late"
    )
