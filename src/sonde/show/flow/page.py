"""A flow report as one self-contained HTML file, and as a fragment for a notebook. Every name is escaped."""

from __future__ import annotations

import math
from html import escape
from typing import Final

from sonde.show.flow.issue import Issue
from sonde.show.flow.metrics import WORDS, Layer
from sonde.show.flow.result import FlowResult
from sonde.show.term.number import counted

# Styles are scoped to our own class: a notebook's page may use the same class names.
_STYLE: Final = """
.sonde-flow { color-scheme: light dark; --ink:#1a1a1a; --soft:#5b6470; --paper:#fff; --line:#d9dde2; --good:#1b7f5c;
  --warn:#8a5a00; --bad:#b3261e; --fill:#2f6db5; --shade:#f4f6f8; }
@media (prefers-color-scheme: dark) { .sonde-flow { --ink:#e8eaed; --soft:#9aa4af; --paper:#16181c; --line:#343a42;
  --good:#4cc38a; --warn:#e2a336; --bad:#ff8a80; --fill:#6ea8ea; --shade:#1f2329; } }
.sonde-flow { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 70rem;
  margin: auto; padding: 1rem; box-sizing: border-box; }
.sonde-flow h1 { font-size: 1.4rem; margin: 0 0 .3rem; } .sonde-flow h2 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
.sonde-flow .soft { color: var(--soft); } .sonde-flow .HEALTHY { color: var(--good); }
.sonde-flow .WARNING, .sonde-flow .MEDIUM { color: var(--warn); }
.sonde-flow .CRITICAL, .sonde-flow .HIGH { color: var(--bad); font-weight: 600; }
.sonde-flow .scroll { overflow-x: auto; }
.sonde-flow table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.sonde-flow th, .sonde-flow td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.sonde-flow th:nth-child(-n+2), .sonde-flow td:nth-child(-n+2) { text-align: left; }
.sonde-flow th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; } .sonde-flow th[aria-sort] button::after { content: " ↑"; }
.sonde-flow th[aria-sort=descending] button::after { content: " ↓"; }
.sonde-flow tr.has-issue td { background: var(--shade); }
.sonde-flow input { font: inherit; color: inherit; background: var(--shade); border: 1px solid var(--line);
  border-radius: .3rem; padding: .35rem .6rem; width: min(24rem, 100%); box-sizing: border-box; margin-bottom: .5rem; }
.sonde-flow article { border-left: 3px solid currentColor; padding: .1rem 0 .1rem .8rem; margin: .7rem 0; }
.sonde-flow article.CRITICAL, .sonde-flow article.HIGH { font-weight: 400; }
.sonde-flow article > * { color: var(--ink); } .sonde-flow article b { color: inherit; }
.sonde-flow pre { background: var(--shade); padding: .5rem .7rem; overflow-x: auto; margin: .3rem 0;
  border-radius: .3rem; }
.sonde-flow td:first-child, .sonde-flow th:first-child { position: sticky; left: 0; background: var(--paper); }
.sonde-flow tr.has-issue td:first-child { background: var(--shade); box-shadow: inset 3px 0 var(--bad); }
@media (max-width: 40rem) { .sonde-flow pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .sonde-flow th, .sonde-flow td { padding: .25rem .4rem; }
  .sonde-flow td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; } }
.sonde-flow figure { display: grid; grid-template-columns: 2.8rem 1fr; margin: 1rem 0 0; font-size: .8rem;
  color: var(--soft); }
.sonde-flow .axis { position: relative; }
.sonde-flow .axis span { position: absolute; right: .4rem; transform: translateY(-50%); line-height: 1; }
.sonde-flow svg { width: 100%; height: 13rem; display: block; }
.sonde-flow figcaption { grid-column: 2; display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem;
  padding-top: .3rem; }
.sonde-flow .legend { flex-basis: 100%; }
"""

_SCRIPT: Final = """
for (const table of document.querySelectorAll('.sonde-flow table')) {
  const body = table.tBodies[0];
  table.querySelectorAll('th button').forEach((button, column) => button.addEventListener('click', () => {
    const head = button.closest('th'), up = head.getAttribute('aria-sort') === 'descending';
    table.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const value = row => { const text = row.cells[column].dataset.value ?? row.cells[column].textContent;
      const number = Number(text); return text === '' ? -Infinity : Number.isNaN(number) ? text : number; };
    [...body.rows].sort((a, b) => { const x = value(a), y = value(b);
      return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1); }).forEach(row => body.append(row));
  }));
}
const filter = document.querySelector('.sonde-flow input');
filter?.addEventListener('input', () => {
  const wanted = filter.value.toLowerCase();
  for (const row of document.querySelectorAll('.sonde-flow tbody tr'))
    row.hidden = !row.dataset.find.toLowerCase().includes(wanted);
});
"""
_FILTER: Final = '<input type="search" placeholder="filter: name, type, critical, …" aria-label="filter layers">'
_COLUMNS: Final = (
    "layer", "type", "score", "relative pressure", "pressure", "max", "turbulence", "velocity", "grad/weight",
)  # fmt: skip
_COLOURS: Final = {"HEALTHY": "var(--fill)", "WARNING": "var(--warn)", "CRITICAL": "var(--bad)"}
_WIDTH: Final = 1000.0
_FURTHEST: Final = 6.0
"""Range of the axis in decades; values beyond it are drawn at its ends."""


def as_html(report: FlowResult) -> str:
    title = escape(f"Gradient flow of {report.model_name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}body {{ margin: 0; background: #fff; }}"
        "@media (prefers-color-scheme: dark) { body { background: #16181c; } }</style></head>"
        f"<body>{_body(report)}<script>{_SCRIPT}</script></body></html>\n"
    )


def as_fragment(report: FlowResult) -> str:
    """The report for a notebook, without a script and the controls that need one."""
    return f"<style>{_STYLE}</style>{_body(report, is_alive=False)}"


def _body(report: FlowResult, *, is_alive: bool = True) -> str:
    num = len(report.issues)
    return (
        '<main class="sonde-flow">'
        f"<h1>Gradient flow of {escape(report.model_name)}</h1>"
        f'<p><b class="{report.status}">{report.health:.0f}/100 {report.status.lower()}</b> '
        f'<span class="soft">loss {report.loss:.4g} · {counted(len(report.layers), "module")} · '
        f"{num} issue{'' if num == 1 else 's'}</span></p>"
        f"{_depth_picture(report)}<h2>Issues</h2>{_issues(report)}<h2>Layers</h2>"
        f'{_FILTER if is_alive else ""}<div class="scroll">{_table(report, is_alive)}</div></main>'
    )


def _issues(report: FlowResult) -> str:
    if not report.issues:
        return '<p class="HEALTHY">No issues: gradients reach every layer, and no layer stands out.</p>'
    return "".join(_issue(issue) for issue in report.issues)


def _issue(issue: Issue) -> str:
    healthy = f' <span class="soft">(healthy: {escape(issue.healthy)})</span>' if issue.healthy else ""
    code = f"<pre>{escape(issue.recommendation)}</pre>" if issue.recommendation else ""
    return (
        f'<article class="{issue.severity}"><p><b class="{issue.severity}">{issue.severity} {issue.type}</b> '
        f"{escape(issue.message)}{healthy}</p>{code}</article>"
    )


def _table(report: FlowResult, is_alive: bool) -> str:
    names = (f'<button type="button">{name}</button>' if is_alive else name for name in _COLUMNS)
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    words = f'<p class="soft">{escape(WORDS)}</p>'
    return f"{words}<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, report.layers))}</tbody></table>"


def _row(layer: Layer) -> str:
    m = layer.metrics
    numbers = [m.relative_pressure, m.mean_pressure, m.max_pressure, m.turbulence, m.velocity]
    cells = "".join(f'<td data-value="{value:.6g}">{value:.3g}</td>' for value in numbers)
    ratio = f'<td data-value="{m.weight_ratio:.6g}">{m.weight_ratio:.3g}</td>' if m.weight_norm else "<td></td>"
    find = escape(" ".join([layer.name, layer.type, layer.health.status, *(i.type for i in layer.health.issues)]))
    return (
        f'<tr{" class=has-issue" if layer.health.issues else ""} data-find="{find}">'
        f"<td>{escape(layer.name).replace('.', '.<wbr>')}</td><td>{escape(layer.type)}</td>"
        f'<td class="{layer.health.status}">{layer.health.score:.0f}</td>{cells}{ratio}</tr>'
    )


def _depth_picture(report: FlowResult) -> str:
    """Relative pressure, one bar per leaf module, on a logarithmic axis centred on the value near the output.

    The chart is stretched to the available width, so its labels are placed next to it and below it.
    """
    layers = [layer for layer in report.layers if layer.is_leaf]
    if not layers:
        return ""
    decades = [max(-_FURTHEST, min(_FURTHEST, _decades(layer))) for layer in layers]
    low, high = math.floor(min(-1.0, *decades)), math.ceil(max(1.0, *decades))
    step = _WIDTH / len(layers)
    bars = "".join(
        _bar(layer, decade, i * step, step, high) for i, (layer, decade) in enumerate(zip(layers, decades, strict=True))
    )
    lines = "".join(
        f'<path d="M0 {high - decade}H{_WIDTH:g}" stroke="var(--line)" vector-effect="non-scaling-stroke"/>'
        for decade in range(low, high + 1)
    )
    names = "".join(
        f'<span style="top:{100 * (high - decade) / (high - low):.1f}%">{_power(decade)}</span>'
        for decade in range(low, high + 1)
    )
    return (
        f'<figure><div class="axis" aria-hidden="true">{names}</div>'
        f'<svg viewBox="0 0 {_WIDTH:g} {high - low}" preserveAspectRatio="none" role="img" '
        f'aria-label="relative pressure along the depth">{lines}{bars}</svg>'
        "<figcaption><span>input</span><span>output</span>"
        f"{_legend(layers)}</figcaption></figure>"
    )


def _legend(layers: list[Layer]) -> str:
    present = {layer.health.status for layer in layers}
    parts = [f'<span style="color:{c}">■</span> {name.lower()}' for name, c in _COLOURS.items() if name in present]
    return f'<span class="legend">pressure (1 = same as near the output) · {" ".join(parts)}</span>'


def _decades(layer: Layer) -> float:
    level = layer.metrics.relative_pressure
    return math.log10(level) if level > 0 else -_FURTHEST


def _power(decade: int) -> str:
    return "1" if decade == 0 else f"1e{decade}"


def _bar(layer: Layer, decade: float, x: float, step: float, high: int) -> str:
    tall = max(abs(decade), 0.04)
    top = high - tall if decade > 0 else high
    title = escape(
        f"{layer.name} ({layer.type}): {layer.metrics.relative_pressure:.2g}, score {layer.health.score:.0f}"
    )
    return (
        f'<rect x="{x + step * 0.1:.2f}" y="{top:.3f}" width="{max(step * 0.8, 0.5):.2f}" height="{tall:.3f}" '
        f'fill="{_COLOURS[layer.health.status]}"><title>{title}</title></rect>'
    )
