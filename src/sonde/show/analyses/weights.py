"""Weight distribution evolution: how far the weights moved, which layers grew, and the spread of their magnitudes."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.errors import CorruptError
from sonde.run import Run
from sonde.show.analyses.analysis import Analysis, Chart, Floats, Line, Quantity, Table, Tone, known
from sonde.show.analyses.layers import Measured, first, first_odd, last, measure, middle, ratio
from sonde.show.term.number import counted

TITLE: Final = "Weight distribution evolution"
GREW: Final = 4.0
"""A layer whose norm changed by more than this factor is worth noting."""
STILL: Final = 1e-6
"""A layer whose norm and spread changed by less than this, relatively, did not move."""
NUM_DRAWN: Final = 4
QUANTILES: Final = (("5 %", "abs_q05"), ("median", "abs_q50"), ("95 %", "abs_q95"), ("largest", "max_abs"))


def weights(run: Run) -> Analysis:
    """Analyze how the weights moved."""
    params = measure(run, "param", ("norm", "rms"))
    if params is None:
        verdict = "No parameters were recorded. Pass the optimizer too: sonde.watch(model, optimizer)."
        return Analysis(key="weights", title=TITLE, tone="unknown", verdict=verdict)
    begin, end = first(params.stats["norm"].values), last(params.stats["norm"].values)
    growth = ratio(end, begin)
    moved = _moved(params)
    tone, verdict = _judge(run, params, growth, moved)
    main = params.main()
    chosen = _most_changed(params, growth)
    return Analysis(
        key="weights",
        title=TITLE,
        tone=tone,
        verdict=verdict,
        quantities=(
            Quantity(
                "growth, median", known(middle(growth[main])), "norm at the end / norm at the start, median layer"
            ),
            Quantity(
                "growth, largest",
                _extreme(growth[main], np.max),
                "norm at the end / norm at the start, layer that grew most",
            ),
            Quantity(
                "growth, smallest",
                _extreme(growth[main], np.min),
                "norm at the end / norm at the start, layer that shrank most",
            ),
            Quantity("still", int((~moved).sum()), "sites that did not change at all"),
            Quantity("not finite", int(params.is_odd.any(axis=1).sum()), "sites that ever had NaN or infinity"),
        ),
        charts=(*_norms(params), *(chart for site in chosen if (chart := _quantiles(run, site)))),
        tables=(_table(params, begin, end, growth),),
    )


def _moved(params: Measured) -> np.ndarray:
    """Whether the rms of a site ever differs from its first value."""
    values = params.stats["rms"].values
    start = first(values)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        far = np.abs(values - start) > STILL * np.abs(start)
    return np.asarray((far & np.isfinite(values)).any(axis=1))


def _judge(run: Run, params: Measured, growth: Floats, moved: np.ndarray) -> tuple[Tone, str]:
    odd = np.flatnonzero(params.is_odd.any(axis=1))
    if len(odd):
        site, step = first_odd(run, "param", params)
        share = f"{len(odd)} of {counted(len(params.sites), 'site')}"
        return "bad", f"Weights became NaN or Inf at {share}, first in {site} at step {step:,}."
    main = params.main()
    known = growth[main & np.isfinite(growth)]
    words = (
        f"The norm of the median layer changed by {np.median(known) - 1:+.1%}"
        if len(known)
        else "Weights were recorded"
    )
    notes = []
    largest = float(np.max(np.abs(np.log(known)), initial=0.0)) if (known > 0).all() else np.inf
    if largest > np.log(GREW):
        row = int(np.argmax(np.where(main & (growth > 0), np.abs(np.log(np.where(growth > 0, growth, 1.0))), -1.0)))
        notes.append(f"the norm of {params.sites[row]} is {growth[row]:.3g} times its initial value")
    if not moved.all():
        still = [params.sites[row] for row in np.flatnonzero(~moved)]
        names = f"{', '.join(still[:3])}{', …' if len(still) > 3 else ''}"
        notes.append(f"{len(still)} of {counted(len(moved), 'site')} never changed ({names})")
    if notes:
        return "watch", f"{words}; {' and '.join(notes)}."
    return "good", f"{words}, and no layer changed by more than a factor of {np.exp(largest):.3g}."


def _most_changed(params: Measured, growth: Floats) -> list[str]:
    """The weights that changed most, by the logarithm of their growth."""
    with np.errstate(divide="ignore", invalid="ignore"):
        far = np.where(params.main() & (growth > 0), np.abs(np.log(growth)), -1.0)
    order = np.argsort(-far, kind="stable")[:NUM_DRAWN]
    return [params.sites[row] for row in sorted(order.tolist()) if far[row] >= 0]


def _norms(params: Measured) -> tuple[Chart, ...]:
    """Growth of the layers over time, relative to the start."""
    pooled = params.stats["norm"]
    values = pooled.values[params.main()]
    relative = values / np.where(first(values) > 0, first(values), np.nan)[:, None]
    some = np.isfinite(relative).any(axis=0)
    if not some.any():
        return ()
    steps = np.array([pooled.column_step(column) for column in range(values.shape[1])], np.int64)[some]
    kinds = (("largest", np.nanmax), ("median layer", np.nanmedian), ("smallest", np.nanmin))
    lines = tuple(Line(name, steps, function(relative[:, some], axis=0)) for name, function in kinds)
    return (Chart(title="norm of the weights, relative to the start", lines=lines),)


def _quantiles(run: Run, site: str) -> Chart | None:
    """The distribution of the magnitudes of one weight over time."""
    # A glob may match more than the name it was made from: "a[0]" also matches "a0".
    names = {stat: f"param/{site}/{stat}" for _, stat in QUANTILES}
    # A run written by another program may have "/" in its site names, which patterns cannot contain.
    patterns = [f"param/{site.replace('/', '?')}/{stat}" for stat in names]
    try:
        columns = run.lines(patterns, points=100)
    except CorruptError:
        return None
    lines = []
    for label, stat in QUANTILES:
        steps, values = columns.get(names[stat], (np.empty(0, np.int64), np.empty(0)))
        known = np.isfinite(values)  # histograms are not recorded at every step
        if known.any():
            lines.append(Line(label, steps[known], values[known]))
    return Chart(title=f"|w| of {site}", lines=tuple(lines), is_log=True) if lines else None


def _table(params: Measured, begin: Floats, end: Floats, growth: Floats) -> Table:
    scale = last(params.stats["rms"].values)
    rows = [
        (site, float(begin[row]), float(end[row]), float(growth[row]), float(scale[row]))
        for row, site in enumerate(params.sites)
    ]
    return Table("layers", ("site", "norm, start", "norm, end", "growth", "rms, end"), tuple(rows))


def _extreme(values: Floats, function: object) -> float | None:
    known = values[np.isfinite(values)]
    return float(function(known)) if len(known) and callable(function) else None
