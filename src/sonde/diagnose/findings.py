"""The findings of a run as a list that shows itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from sonde.diagnose.diagnosis import Diagnosis
from sonde.diagnose.finding import Chart, Finding
from sonde.display import Results
from sonde.schema.thinning import min_max
from sonde.schema.window import Window

CHART_POINTS: Final = 200
"""Number of intervals of a chart; minimum and maximum of each are kept."""
_MIN_POINTS: Final = 3
_NUM_SHOWN: Final = 20


class Findings(Results[Finding]):
    """Findings, most likely root cause first; a list that shows itself."""

    @classmethod
    def of(cls, found: Diagnosis) -> Findings:
        """The findings of a diagnosis, each with its chart."""
        return cls(replace(finding, chart=_chart(finding, found.window)) for finding in found.findings)

    def causes(self) -> dict[tuple[str, tuple[str, ...]], str]:
        """The rule that explains a finding, by the rule and sites of that finding."""
        return {(symptom.rule, symptom.sites): cause.rule for cause in self for symptom in cause.cause_of}

    def __repr__(self) -> str:
        if not self:
            return "No findings"
        explained = self.causes()
        roots = [finding for finding in self if (finding.rule, finding.sites) not in explained]
        blocks = [repr(finding) for finding in roots[:_NUM_SHOWN]]
        if len(roots) > _NUM_SHOWN:
            blocks.append(f"and {len(roots) - _NUM_SHOWN} more")
        symptoms = [finding.rule for finding in self if (finding.rule, finding.sites) in explained]
        if symptoms:
            blocks.append(f"Consequences of these: {', '.join(dict.fromkeys(symptoms))}")
        return "\n".join([f"{len(self)} finding{'' if len(self) == 1 else 's'}", *blocks])


def _chart(finding: Finding, window: Window) -> Chart | None:
    """The series of the first evidence that is a point of it, else of the first that was recorded at enough steps."""
    for evidence in sorted(finding.evidence, key=lambda one: one.step is None):
        steps, values = window.get(evidence.series)
        if len(values) >= _MIN_POINTS:
            kept = min_max(steps, values, CHART_POINTS)
            shown = [one.step for one in finding.evidence if one.series == evidence.series and one.step is not None]
            kept = np.union1d(kept, np.flatnonzero(np.isin(steps, shown)))
            return Chart(evidence.series, steps[kept], values[kept])
    return None
