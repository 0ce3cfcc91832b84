"""A report as Markdown, readable both raw and rendered. Text from a run is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from sonde.diagnose.check import all_rules
from sonde.diagnose.finding import Finding, span
from sonde.schema.records import flatten
from sonde.show.analyses.analysis import Analysis, Chart, Quantity, Table
from sonde.show.diagnosis import counts_in_words, health_of, verdict
from sonde.show.report.source import Report
from sonde.show.term.number import count, counted, duration, number
from sonde.show.term.sparkline import sparkline
from sonde.show.term.text import plain, prose

MARK: Final = "<!-- sonde report -->"
MAX_ROWS: Final = 20
SPARK: Final = 40
_SPECIAL: Final = re.compile(r"([\\`*_\[\]<>|~$&]|^[#+=-]|^\d+(?=[.)]))")
_TONES: Final = {"good": "✓", "watch": "!", "bad": "✗", "unknown": "?"}


def to_markdown(report: Report) -> str:
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: Report) -> Iterator[str]:
    facts, found = report.facts, report.diagnosis
    yield MARK
    yield f"# {escape(facts['project'])}/{escape(facts['name'])}"
    yield ""
    health = health_of(found)
    score = "health unknown" if health is None else f"health {health:.0f} of 100"
    took = f"{counted(facts['last_step'] + 1, 'step')} in {duration(facts['duration_s'])}"
    counts = "unknown" if found.is_blind else counts_in_words(found.counts()) or "none"
    yield f"**{facts['status']}**, {took}, {score}, findings: {counts}."
    yield ""
    yield from _table(("", ""), _fact_rows(facts))
    for warning in facts["warnings"]:
        yield f"> ⚠ {escape(warning)}"
        yield ""
    yield "## Findings"
    yield ""
    yield from _findings(report)
    for analysis in report.analyses:
        yield from _analysis(analysis)
    config = list(flatten(facts["config"]).items())
    if config:
        yield "## Configuration"
        yield ""
        yield from _table(("setting", "value"), [(code(key), code(value)) for key, value in config])
    yield f"Written by sonde {facts['sonde_version']}: `sonde report {facts['id']}`."


def _fact_rows(facts: Any) -> list[tuple[str, str]]:
    git = facts["git"] or {}
    rows = [
        ("reason", escape(facts["reason"])),
        ("started", escape(facts["created"])),
        ("id", code(facts["id"])),
        ("command", code(" ".join(facts["command"]))),
        ("host", escape(facts["host"])),
        ("git", code(str(git.get("revision", ""))[:12])),
        ("tags", escape(", ".join(facts["tags"]))),
        ("notes", escape(facts["notes"])),
        ("sites", count(facts["num_sites"])),
        ("recording", escape(facts["overhead"])),
        *(("coverage", escape(sentence)) for sentence in facts["coverage"]),
    ]
    return [(name, text) for name, text in rows if text not in ("", "``")]


def _findings(report: Report) -> Iterator[str]:
    found = report.diagnosis
    shown = [*found.roots, *found.remarks]
    if not shown:
        yield f"{verdict(report.diagnosis).capitalize()}. {escape(report.checked)}"
        yield ""
    for finding in shown:
        yield from _finding(finding, report)


def _finding(finding: Finding, report: Report) -> Iterator[str]:
    confidence = f"confidence {100 * finding.confidence:.0f} %"
    yield f"### {escape(finding.rule)} ({finding.severity}, {confidence}, {span(finding)})"
    yield ""
    yield _prose(finding.message)
    yield ""
    if finding.evidence:
        steps, values = report.diagnosis.window.get(finding.evidence[0].series)
        if len(values) >= 3:
            where = f"{code(finding.evidence[0].series)}, steps {steps[0]:,} to {steps[-1]:,}"
            yield f"`{sparkline(values, SPARK)}` {where}"
            yield ""
        rows = [
            (code(e.series), number(e.value), escape(e.meaning), count(e.step), escape(e.healthy))
            for e in finding.evidence
        ]
        yield from _table(("series", "value", "meaning", "step", "healthy"), rows)
    if finding.traceback:
        yield "```text"
        yield from (plain(line).replace("`", "'") for line in finding.traceback.splitlines())
        yield "```"
        yield ""
    if finding.remedy:
        yield f"**Fix:** {_prose(finding.remedy)}"
        yield ""
    if finding.rule in all_rules():
        yield f"[About {escape(finding.rule)}]({finding.doc})"
        yield ""
    for symptom in finding.cause_of:
        yield f"- Also caused {escape(symptom.rule)}: {_prose(symptom.message)}"
    if finding.cause_of:
        yield ""


def _analysis(analysis: Analysis) -> Iterator[str]:
    yield f"## {analysis.title}"
    yield ""
    yield f"**{_TONES[analysis.tone]}** {escape(analysis.verdict)}"
    yield ""
    if analysis.quantities:
        rows = [(escape(one.name), value_text(one), escape(one.meaning)) for one in analysis.quantities]
        yield from _table(("quantity", "value", "meaning"), rows)
    for chart in analysis.charts:
        yield from _chart(chart)
    for table in analysis.tables:
        yield from _layers(table)


def value_text(quantity: Quantity) -> str:
    if quantity.value is None or not math.isfinite(quantity.value):
        return "–"
    return count(int(quantity.value)) if quantity.is_step else number(quantity.value)


def _chart(chart: Chart) -> Iterator[str]:
    """Each line as a sparkline, with its first and last value."""
    yield f"{escape(chart.title)}{', log scale' if chart.is_log else ''}"
    yield ""
    rows = []
    for line in chart.lines:
        if len(line.y):
            shown = np.where(line.y > 0, np.log10(np.maximum(line.y, 1e-300)), np.nan) if chart.is_log else line.y
            rows.append((escape(line.name), f"`{sparkline(shown, SPARK)}`", number(line.y[0]), number(line.y[-1])))
    yield from _table(("", "", "first", "last"), rows)


def _layers(table: Table) -> Iterator[str]:
    rows = [tuple(number(cell) if isinstance(cell, float | int) else code(cell) for cell in row) for row in table.rows]
    yield from _table(tuple(map(escape, table.columns)), rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        yield f"and {len(rows) - MAX_ROWS} more; `sonde report --format json` includes them all."
        yield ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join(' --- ' for _ in columns)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _prose(text: str) -> str:
    return "".join(code(part) if is_code else escape(part) for part, is_code in prose(text))


def escape(value: object) -> str:
    """Escape text for Markdown, on one line.

    >>> escape("a_b <script>")
    'a\\\\_b \\\\<script\\\\>'
    """
    return _SPECIAL.sub(r"\\\1", plain(value))


def code(value: object) -> str:
    """Format text as code, escaping bars, which would end a table cell, and back-ticks."""
    text = plain(value).replace("`", "'").replace("|", "¦")
    return f"`{text}`" if text else ""
