"""A run as a card in a notebook: status, loss, health, findings with their remedies, the weakest layers.

No script, nothing loaded from elsewhere, every text escaped; parts unfold by <details>, which every notebook knows.
Colours are shades of the notebook's own, so that it is at home on light and dark pages.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from sonde.diagnose.finding import Evidence, Finding
from sonde.diagnose.health import grade
from sonde.errors import SondeError
from sonde.run import Run
from sonde.schema.records import flatten
from sonde.schema.thinning import min_max
from sonde.show.coverage import coverage_sentences, overhead_sentence
from sonde.show.diagnosis import counts_in_words, stored_diagnosis
from sonde.show.plot.axes import spans_decades
from sonde.show.summary import SeriesSummary, duration_s, largest_gradients, loss_series, scalar_series
from sonde.show.term.finding import span
from sonde.show.term.number import counted, duration, number
from sonde.show.term.sparkline import sparkline
from sonde.show.term.text import plain
from sonde.show.web.caches.diagnoses import recorded_findings
from sonde.show.web.caches.run_summaries import MAX_ROWS_TO_JUDGE

WIDTH: Final = 480
HEIGHT: Final = 64
POINTS: Final = 200
MARGIN: Final = 4
NUM_FINDINGS: Final = 8
NUM_LAYERS: Final = 8
NUM_SCALARS: Final = 20
_COLOURS: Final = {"critical": "#d7263d", "warning": "#c77700", "info": "#3f7cac"}
_STATUS: Final = {"running": "#0b7fa5", "finished": "#2a8c5a", "crashed": "#d7263d", "interrupted": "#c77700"}
_RULES: Final = {
    "": "font:13px/1.45 system-ui,sans-serif;border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:12px;"
    "max-width:860px;color:inherit;background:transparent;overflow-wrap:anywhere",
    "*": "box-sizing:border-box",
    ".sonde-head": "display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline",
    ".sonde-name": "font-size:16px;font-weight:650",
    ".sonde-dim": "opacity:.7",
    ".sonde-top": "display:grid;grid-template-columns:minmax(0,3fr) minmax(110px,1fr);gap:14px;align-items:center;"
    "margin:8px 0",
    "svg": "display:block;width:100%;height:64px",
    ".sonde-health": "font-size:24px;font-weight:650;line-height:1.1",
    ".sonde-bar": "height:6px;border-radius:3px;background:rgba(128,128,128,.25);overflow:hidden;margin-top:4px",
    ".sonde-bar>span": "display:block;height:100%",
    "details": "border-top:1px solid rgba(128,128,128,.25);padding:5px 0",
    "summary": "cursor:pointer;font-weight:600",
    ".sonde-finding": "border-left:3px solid;padding:2px 0 2px 10px;margin:8px 0",
    "code": "font:12px ui-monospace,monospace;background:rgba(128,128,128,.15);color:inherit;padding:1px 5px;"
    "border-radius:4px;white-space:pre-wrap",
    "table": "border-collapse:collapse;margin:4px 0;color:inherit;background:transparent;font-size:12px",
    "th": "text-align:left;padding:1px 12px 1px 0;border:0;background:transparent;font-weight:400",
    "td": "text-align:left;padding:1px 12px 1px 0;border:0;background:transparent;vertical-align:top",
    ".sonde-n": "text-align:right;font-variant-numeric:tabular-nums",
    ".sonde-warn": "color:#c77700",
}
STYLE: Final = "".join(f".sonde-card {selector}".strip() + f"{{{rules}}}" for selector, rules in _RULES.items())


def card(run: Run) -> str:
    """The card. A run that is damaged is shown as far as it can be read, and the damage is named."""
    findings, health, layers, problem = _judged(run)
    loss = _quietly(lambda: loss_series(run))
    parts = [
        _head(run),
        f'<div class="sonde-top"><div>{_loss(loss)}</div>{_health(health)}</div>',
        *(f'<div class="sonde-warn">⚠ {_safe(text)}</div>' for text in dict.fromkeys((*run.warnings, *problem))),
        _fold(_findings_title(findings), _findings(findings), is_open=bool(findings)),
        _fold("Weakest layers", _layers(layers)) if layers else "",
        _fold("Largest gradients", _series(_quietly(lambda: largest_gradients(run, num_sites=NUM_LAYERS)) or [])),
        _fold("Logged numbers", _series(scalar_series(run))),
        _fold("About", _about(run)),
    ]
    return f'<div class="sonde-card"><style>{STYLE}</style>{"".join(parts)}</div>'


def bundle(run: Run) -> dict[str, str]:
    """What a notebook is given: the card, and a line for where there is none."""
    return {"text/html": card(run), "text/plain": repr(run)}


def _judged(run: Run) -> tuple[list[Finding], float | None, list[tuple[str, float]], list[str]]:
    """Findings that nothing explains, health, layers by their newest score; of a large run what training found."""
    try:
        if run.num_rows > MAX_ROWS_TO_JUDGE:
            return list(recorded_findings(run)), stored_diagnosis(run)[1], [], []
        found = run.diagnosis()
    except SondeError as error:
        return [], None, [], [str(error)]
    scores = found.health
    last = {site: float(row[-1]) for site, row in zip(scores.sites, scores.scores, strict=True) if site and row.size}
    layers = sorted((item for item in last.items() if item[1] < 99.5), key=lambda item: item[1])
    health = None if np.isnan(scores.last) else scores.last
    return [*found.roots, *found.remarks], health, layers[:NUM_LAYERS], []


def _quietly(read: Any) -> Any:
    """What can be read, else None: the damage is in the warnings, which are shown."""
    try:
        return read()
    except SondeError:
        return None


def _safe(value: object) -> str:
    return html.escape(plain(value), quote=True)


def _head(run: Run) -> str:
    status, steps = run.status, run.last_step + 1
    facts = [counted(steps, "step") if steps else "no step yet", f"in {duration(duration_s(run))}", run.reason]
    shown = "".join(f'<span class="sonde-dim">{_safe(fact)}</span>' for fact in facts if fact)
    dot = f'<span style="color:{_STATUS.get(status, "inherit")}">● {_safe(status)}</span>'
    name = f'<span class="sonde-name">{_safe(run.project)}/{_safe(run.name)}</span>'
    return f'<div class="sonde-head">{name}{dot}{shown}</div>'


def _loss(loss: SeriesSummary | None) -> str:
    if loss is None:
        return '<span class="sonde-dim">no loss was logged</span>'
    ends = f"{number(loss.first)} → {number(loss.last)}, lowest {number(loss.min)}"
    bad = f", {loss.num_nonfinite:,} not finite" if loss.num_nonfinite else ""
    return f'<div class="sonde-dim">{_safe(loss.name)}  {_safe(ends)}{_safe(bad)}</div>{loss_picture(loss)}'


def _health(health: float | None) -> str:
    if health is None:
        return '<div class="sonde-dim">health unknown</div>'
    return f'<div><div class="sonde-dim">health</div><div class="sonde-health">{health:.0f}</div>{_bar(health)}</div>'


def _bar(score: float) -> str:
    colour = {**_COLOURS, "info": "#2a8c5a"}[grade(score)]
    return f'<div class="sonde-bar"><span style="width:{max(score, 2):.0f}%;background:{colour}"></span></div>'


def _fold(title: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{content}</details>" if content else ""


def _findings_title(findings: Sequence[Finding]) -> str:
    counts = Counter(str(finding.severity) for finding in findings)
    return f"Findings: {counts_in_words(counts)}" if findings else "No findings"


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return '<span class="sonde-dim">The rules found nothing wrong in what was recorded.</span>'
    more = len(findings) - NUM_FINDINGS
    rest = f'<div class="sonde-dim">and {more} more: run.findings()</div>' if more > 0 else ""
    return "".join(map(_finding, findings[:NUM_FINDINGS])) + rest


def _said(evidence: Evidence) -> str:
    """What a number is, and of what: two layers may say the same."""
    return f"{evidence.meaning}, {evidence.series}" if evidence.meaning else evidence.series


def _finding(finding: Finding) -> str:
    colour = _COLOURS[str(finding.severity)]
    head = f'<b style="color:{colour}">{_safe(finding.severity)}</b> <b>{_safe(finding.rule)}</b>'
    when = f'<span class="sonde-dim">{_safe(span(finding))}, {100 * finding.confidence:.0f} % sure</span>'
    shown = "".join(
        f'<div class="sonde-dim">{_safe(number(one.value))} {_safe(_said(one))}'
        f"{f' (healthy: {_safe(one.healthy)})' if one.healthy else ''}</div>"
        for one in finding.evidence[:2]
    )
    remedy = f"<div>do <code>{_safe(finding.remedy)}</code></div>" if finding.remedy else ""
    also = ", ".join(dict.fromkeys(symptom.rule for symptom in finding.cause_of))
    explains = f'<div class="sonde-dim">explains {_safe(also)}</div>' if also else ""
    text = f"{head} {when}<div>{_safe(finding.message)}</div>{shown}{remedy}{explains}"
    return f'<div class="sonde-finding" style="border-color:{colour}">{text}</div>'


def _layers(layers: Iterable[tuple[str, float]]) -> str:
    rows = [
        f'<tr><td>{_safe(site)}</td><td class="sonde-n">{score:.0f}</td><td style="width:120px">{_bar(score)}</td></tr>'
        for site, score in layers
    ]
    return f"<table>{''.join(rows)}</table>"


def _series(series: Sequence[SeriesSummary]) -> str:
    if not series:
        return ""
    titles = ("", "", "first", "last", "lowest", "highest")
    head = "".join(f'<th class="{"sonde-n" if title else ""} sonde-dim">{title}</th>' for title in titles)
    rows = []
    for one in series[:NUM_SCALARS]:
        numbers = "".join(
            f'<td class="sonde-n">{number(value)}</td>' for value in (one.first, one.last, one.min, one.max)
        )
        rows.append(f"<tr><td>{_safe(one.name)}</td><td>{sparkline(one.values, 24)}</td>{numbers}</tr>")
    more = len(series) - NUM_SCALARS
    rest = f'<div class="sonde-dim">and {more} more: run.scalars()</div>' if more > 0 else ""
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{rest}"


def _about(run: Run) -> str:
    manifest = run.manifest
    facts = [
        ("id", run.id),
        ("began", f"{run.created:%Y-%m-%d %H:%M:%S} UTC"),
        ("tags", ", ".join(run.tags)),
        ("notes", run.notes),
        ("command", " ".join(manifest.command)),
        ("recording", overhead_sentence(manifest.facts.get("overhead"))),
        *(("coverage", sentence) for sentence in coverage_sentences(run.coverage())),
        *flatten(run.config).items(),
        ("folder", run.path),
    ]
    rows = [f'<tr><td class="sonde-dim">{_safe(key)}</td><td>{_safe(value)}</td></tr>' for key, value in facts if value]
    return f"<table>{''.join(rows)}</table>"


def loss_picture(loss: SeriesSummary) -> str:
    """The curve; made of numbers alone, so that there is nothing to escape."""
    kept = min_max(loss.steps, loss.values, POINTS)
    steps, values = loss.steps[kept], loss.values[kept]
    is_log = spans_decades([values])
    finite = np.isfinite(values) & ((values > 0) if is_log else True)
    if not finite.any():
        return ""
    heights = np.log10(values[finite]) if is_log else values[finite] / 2  # halved: a span of floats must not overflow
    x = _scaled(steps.astype(np.float64), float(steps[0]), float(steps[-1]), WIDTH)
    y = HEIGHT - _scaled(heights, float(heights.min()), float(heights.max()), HEIGHT)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x[finite], y, strict=True))
    crosses = "".join(
        f'<path d="M{a - 3:.1f} {HEIGHT - 9}l6 6m0-6l-6 6" stroke="#d7263d" stroke-width="1.4"/>'
        for a in x[~np.isfinite(values)][:: max(1, int((~finite).sum()) // 40)]
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="loss over steps{", logarithmic" if is_log else ""}">'
        f'<polyline points="{line}" fill="none" stroke="#2a93b8" stroke-width="1.5"/>'
        f"{crosses}</svg>"
    )


def _scaled(values: np.ndarray, low: float, high: float, size: int) -> np.ndarray:
    """From the margin to the other margin."""
    span = high - low
    share = (values - low) / span if span > 0 else np.full(len(values), 0.5)
    return np.asarray(MARGIN + share * (size - 2 * MARGIN))
