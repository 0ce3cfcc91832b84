"""Requirements on every number that a finding shows: at its step it is in its chart, and outside its healthy range."""

from __future__ import annotations

import math

import numpy as np

from sonde.diagnose.finding import Finding
from sonde.diagnose.grounding import is_healthy
from sonde.schema.window import Window


def complaints(finding: Finding, window: Window) -> list[str]:
    """Everything that contradicts the recorded series, in words."""
    found = []
    for one in finding.evidence:
        steps, values = window.get(one.series)
        recorded = values[steps == one.step] if one.step is not None else values[:0]
        if one.step is not None and not len(recorded):
            found.append(f"{one.series}: nothing was recorded at step {one.step}")
        elif len(recorded) and not _same(float(recorded[0]), one.value):
            found.append(f"{one.series}: {one.value:.6g} at step {one.step}, recorded {recorded[0]:.6g}")
        if is_healthy(one.value, one.healthy):
            found.append(f"{one.series}: {one.value:.4g} is healthy: {one.healthy}")
        if finding.chart is not None and finding.chart.series == one.series and one.step is not None:
            shown = finding.chart.values[finding.chart.steps == one.step]
            if not len(shown) or not _same(float(shown[0]), one.value):
                found.append(f"{one.series}: {one.value:.6g} at step {one.step} is not in the chart")
    return [f"{finding.rule}: {text}" for text in found]


def _same(recorded: float, shown: float) -> bool:
    return math.isclose(recorded, shown, rel_tol=1e-6) or bool(np.isnan(recorded) and np.isnan(shown))
