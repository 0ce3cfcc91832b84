"""Adam's second moment is out of date while gradients grow: updates become too large, and the loss spikes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.measures.loss import find_spikes, learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.sketch import Array
from sonde.schema.window import Grid, Window

LAG: Final = 2.3
"""sqrt(mean(gradient**2 / v)) of one weight; above this, spikes follow (Wortsman)."""
BEFORE: Final = 8
"""Maximum number of steps from the lag to the spike."""
MOST: Final = 0.6
RARE: Final = 0.35
"""Maximum fraction of steps with such a lag; a lag that is always present predicts nothing."""


@rule(
    severity="warning",
    needs=("update/*/second_moment_lag",),
    causes=("loss_spikes", "exploding_gradients", "loss_oscillation"),
    references=("Wortsman et al. 2023, Stable and low-precision training for large-scale vision-language models",),
)
def adam_second_moment_underestimate(window: Window) -> Iterator[Found]:
    """Loss spikes follow steps at which Adam's second moment was far smaller than the gradient."""
    loss = learned(window)
    lags = window.grid("update/*/second_moment_lag")
    if loss is None or not loss.unit > 0 or not len(lags):
        return
    spikes = find_spikes(loss, spreads=4.0, share=0.05)
    if len(spikes) < 2:
        return
    rows = _matrices(window, lags)
    if not len(rows):
        return
    highest = np.sqrt(np.fmax.reduce(lags.values[rows], axis=0))
    preceded = [spike for spike in spikes if _peak_before(lags, highest, spike.step) >= LAG]
    if len(preceded) < MOST * len(spikes) or (highest >= LAG).mean() > RARE:
        return
    first = preceded[0].step
    worst = _worst(lags, rows, first)
    beta2 = (structure(window).group_value("betas") or (0.9, 0.999))[1]
    yield Found(
        f"{len(preceded)} of {len(spikes)} loss spikes came at most {BEFORE} steps after Adam's second moment of "
        f"{worst} lagged its gradient, first at step {first:,}.",
        step=first,
        confidence=0.8,
        sites=(worst,),
        evidence=[
            Evidence(
                f"update/{worst}/second_moment_lag",
                max(_peak_before(lags, highest, spike.step) for spike in preceded),
                "below 2.3",
                first,
                "sqrt(mean(gradient**2 / v)) before a spike",
            ),
            Evidence(loss.name, float(len(spikes)), "0", None, "number of spikes"),
        ],
        remedy=f"Lower beta2: `{structure(window).optimizer_type or 'AdamW'}(..., betas=(0.9, 0.95))` (now {beta2}). "
        "Or divide each weight's learning rate by `max(1, lag)`, as StableAdamW does.",
    )


def _matrices(window: Window, lags: Grid) -> list[int]:
    """Rows of the weight matrices: the mean over the few elements of a bias is too noisy."""
    known = {p.name for p in structure(window).parameters if len(p.shape) >= 2}
    return [row for row, site in enumerate(lags.sites) if not known or site in known]


def _peak_before(lags: Grid, highest: Array, step: int) -> float:
    inside = (lags.steps < step) & (lags.steps >= step - BEFORE)
    known = highest[inside]
    return float(nanmax(known)) if np.isfinite(known).any() else 0.0


def _worst(lags: Grid, rows: list[int], step: int) -> str:
    inside = (lags.steps < step) & (lags.steps >= step - BEFORE)
    peaks = [float(np.fmax.reduce(lags.values[row, inside], initial=0.0)) for row in rows]
    return lags.sites[rows[int(np.argmax(peaks))]]
