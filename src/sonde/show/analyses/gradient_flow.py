"""Gradient flow: how gradients change on their way through the layers, early and late, and how large updates are."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.run import Run
from sonde.show.analyses.analysis import Analysis, Chart, Floats, Line, Quantity, Table, Tone, known
from sonde.show.analyses.layers import Measured, early, first_odd, late, measure, middle, ratio

TITLE: Final = "Gradient flow"
UNEVEN: Final = 100.0
"""Gradients of the first third of the layers over those of the last third, or the other way round: worth a look ..."""
BROKEN: Final = 1e4
"""... and this much: learning has all but stopped at one end."""
UPDATE: Final = (1e-5, 1e-1)
"""Where norm of update / norm of weight usually lies; about 1e-3 is the rule of thumb."""


def gradient_flow(run: Run) -> Analysis:
    """Gradients along depth."""
    grads = measure(run, "grad", ("rms", "norm"))
    if grads is None:
        verdict = "No gradients were recorded. Give the optimizer too:  sonde.watch(model, optimizer)."
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
            Quantity("lean", known(lean), "gradients of the first third of the layers over those of the last third"),
            Quantity("spread", known(_spread(end[grads.main()])), "decades between the largest and the smallest layer"),
            Quantity("total, early", known(_total(grads, early)), "norm of all gradients, first quarter of the run"),
            Quantity("total, late", known(_total(grads, late)), "the same, last quarter"),
            Quantity("update ratio", known(size), "norm of the update over norm of the weight, median layer, late"),
            Quantity("zero", int((end == 0).sum()), "sites whose gradient is zero at the end"),
            Quantity("not finite", int(grads.is_odd.any(axis=1).sum()), "sites that ever had a NaN or an infinity"),
        ),
        charts=(_along_depth(grads, begin, end), _over_steps(grads)),
        tables=(_table(grads, begin, end, updates),),
    )


def _judge(run: Run, grads: Measured, lean: float, end: Floats, size: float) -> tuple[Tone, str]:
    odd = np.flatnonzero(grads.is_odd.any(axis=1))
    if len(odd):
        site, step = first_odd(run, "grad", grads)
        share = f"{len(odd)} of {len(grads.sites)} sites"
        return "bad", f"Gradients stopped being finite: {share}, the first of them {site} at step {step:,}."
    words = f"gradients of the first layers are {_times(lean)} those of the last"
    if np.isfinite(lean) and not 1 / BROKEN < lean < BROKEN:
        name = "vanish" if lean < 1 else "grow"
        return "bad", f"Gradients {name} on their way back: {words}."
    notes = []
    if (end == 0).any():
        notes.append(f"{int((end == 0).sum())} of {len(end)} sites have a gradient of exactly zero")
    if np.isfinite(size) and not UPDATE[0] < size < UPDATE[1]:
        notes.append(f"updates are {size:.1e} of the weights, where about 1e-3 is usual")
    if np.isfinite(lean) and not 1 / UNEVEN < lean < UNEVEN:
        notes.append(words)
    if notes:
        return "watch", f"Gradients flow through all layers, but {' and '.join(notes)}."
    even = f": {words}" if np.isfinite(lean) else ""
    return "good", f"Gradients flow evenly through {len(grads.sites)} sites{even}."


def _times(value: float) -> str:
    return f"{value:.3g} times" if value >= 0.01 else f"{value:.1e} times"


def _lean(profile: Floats) -> float:
    """First third over last third of the layers, by medians."""
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
    """The spread of the layers over time: median, lowest and highest."""
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
