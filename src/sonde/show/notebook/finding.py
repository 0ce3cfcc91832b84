"""A finding in a notebook: severity, message, chart, evidence, remedy and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from sonde.diagnose.check import all_rules
from sonde.diagnose.explanation import Explanation
from sonde.diagnose.finding import Chart, Evidence, Finding, span
from sonde.diagnose.findings import Findings
from sonde.show.diagnosis import counts_in_words
from sonde.show.notebook.curve import curve
from sonde.show.notebook.style import SEVERITY_COLOURS, dim, fold, prose, safe
from sonde.show.term.number import number

NUM_FINDINGS: Final = 8
"""Number of findings shown in full."""
_NUM_EVIDENCE: Final = 2


def findings_html(findings: Findings) -> str:
    """Root findings in full, their consequences and the rest folded."""
    explained = findings.causes()
    roots = [finding for finding in findings if (finding.rule, finding.sites) not in explained]
    consequences = [finding for finding in findings if (finding.rule, finding.sites) in explained]
    more = roots[NUM_FINDINGS:]
    return (
        f"<b>{findings_title(findings)}</b>{findings_list(roots[:NUM_FINDINGS])}"
        f"{fold(f'More: {len(more)}', ''.join(map(finding_html, more)))}"
        f"{fold(f'Consequences: {len(consequences)}', ''.join(map(finding_html, consequences)))}"
    )


def explanation_html(explanation: Explanation) -> str:
    """A finding, and the reasons for it."""
    lines = "".join(f"<div>{safe(line)}</div>" for line in explanation.lines())
    return f"{finding_html(explanation.finding)}{dim(lines)}"


def findings_title(findings: Sequence[Finding]) -> str:
    """The number of findings of each severity."""
    counts = Counter(str(finding.severity) for finding in findings)
    return f"Findings: {counts_in_words(counts)}" if findings else "No findings"


def findings_list(findings: Sequence[Finding]) -> str:
    return "".join(map(finding_html, findings)) or dim("No problems found in the recorded data.")


def finding_html(finding: Finding) -> str:
    colour = SEVERITY_COLOURS[str(finding.severity)]
    head = f'<b style="color:{colour}">{safe(finding.severity)}</b> <b>{safe(finding.rule)}</b>'
    when = f'<span class="sonde-dim">{safe(span(finding))}, confidence {100 * finding.confidence:.0f} %</span>'
    parts = [
        f"{head} {when}<div>{prose(finding.message)}</div>",
        "" if finding.chart is None else _chart(finding.chart, finding, colour),
        *(dim(_evidence(one)) for one in finding.evidence[:_NUM_EVIDENCE]),
        fold("Traceback", _lines(finding.traceback)),
        f"<div><b>Fix:</b> {prose(finding.remedy)}</div>" if finding.remedy else "",
        _why(finding),
    ]
    return f'<div class="sonde-finding" style="border-color:{colour}">{"".join(parts)}</div>'


def _chart(chart: Chart, finding: Finding, colour: str) -> str:
    drawn = curve((chart.steps, chart.values), span=(finding.step, finding.last_step), colour=colour)
    finite = chart.values[np.isfinite(chart.values)]
    extent = f", {number(float(finite.min()))} to {number(float(finite.max()))}" if len(finite) else ""
    steps = f"steps {int(chart.steps[0]):,} to {int(chart.steps[-1]):,}"
    return f"{drawn}{dim(f'{safe(chart.series)}, {steps}{extent}')}" if drawn else ""


def _lines(text: str) -> str:
    """Text as it is, line by line."""
    return f"<pre>{chr(10).join(map(safe, text.splitlines()))}</pre>" if text else ""


def _evidence(evidence: Evidence) -> str:
    """A number, its meaning and its series: two layers may have the same meaning."""
    meaning = f"{evidence.meaning}, {evidence.series}" if evidence.meaning else evidence.series
    healthy = f" (healthy: {safe(evidence.healthy)})" if evidence.healthy else ""
    return f"{safe(number(evidence.value))} {safe(meaning)}{healthy}"


def _why(finding: Finding) -> str:
    """The meaning of the rule, its references, and what the finding caused."""
    rule = all_rules().get(finding.rule)
    also = ", ".join(dict.fromkeys(symptom.rule for symptom in finding.cause_of))
    lines = [
        prose(" ".join(rule.meaning.split())) if rule is not None else "",
        f"Also caused: {safe(also)}" if also else "",
        f"See: {safe('; '.join(finding.references))}" if finding.references else "",
        f'<a href="{safe(finding.doc)}">About this rule</a>' if rule is not None else "",
    ]
    return fold("Why", "".join(map(dim, filter(None, lines))))
