"""Analyses as one HTML page with line charts and bars. It has no script, loads nothing, and escapes all text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from sonde.show.analyses.analysis import Analysis, Curve, Table
from sonde.show.term.number import number
from sonde.show.term.text import prose

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 200, 56, 22, 10
_META: Final = (
    '<meta charset="utf-8"><meta name="generator" content="sonde report">'
    '<meta name="viewport" content="width=device-width">'
)
_STYLE: Final = (
    ":root{color-scheme:light dark;--c0:light-dark(#2563eb,#7aa2f7);--c1:light-dark(#d97706,#e0af68);"
    "--c2:light-dark(#059669,#73daca);--quiet:light-dark(#6b7280,#8b93a1);--rule:light-dark(#e5e7eb,#2a2f3a)}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;"
    "background:light-dark(#fff,#111418);color:light-dark(#111827,#d5d9e0)}"
    "h2{margin:2.2rem 0 .3rem}.verdict{font-weight:600;margin:.3rem 0 .8rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.6rem 0;display:block;overflow-x:auto}"
    "td,th{padding:.15rem 1.2rem .15rem 0;text-align:left;vertical-align:top}"
    "th{color:var(--quiet);font-weight:500;border-bottom:1px solid var(--rule)}td.n,th.n{text-align:right}"
    ".facts td:first-child{color:var(--quiet)}.facts td:last-child{overflow-wrap:anywhere}"
    "figure{margin:.8rem 0;overflow-x:auto}svg{width:100%;min-width:30rem;height:auto}"
    "svg text{font-size:11px;fill:var(--quiet)}"
    "path{fill:none;stroke:var(--rule)}polyline{fill:none;stroke-width:1.6;stroke-linecap:round}"
    ".c0{stroke:var(--c0);color:var(--c0)}.c1{stroke:var(--c1);color:var(--c1)}.c2{stroke:var(--c2);color:var(--c2)}"
    "figcaption span{margin-right:1.2rem;font-size:13px}figcaption span::before{content:'\u25cf ';font-size:10px}"
    ".bar{display:inline-block;height:.6em;background:var(--c0);border-radius:2px}"
    ".critical{color:light-dark(#b91c1c,#f7768e)}.warning{color:light-dark(#b45309,#e0af68)}.info{color:var(--quiet)}"
)


def to_page(name: str, analyses: Iterable[Analysis], findings: Iterable[Mapping[str, Any]]) -> str:
    parts = [f"<h1>{escape(name)}</h1>", *map(_section, analyses), _findings(list(findings))]
    head = f"{_META}<title>{escape(name)}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _section(analysis: Analysis) -> str:
    cells = "".join(f"<tr><td>{escape(key)}</td><td>{shown(value)}</td></tr>" for key, value in analysis.facts.items())
    return (
        f"<h2>{escape(analysis.title)}</h2><p class=verdict>{escape(analysis.verdict)}</p>"
        f"{line_chart(analysis.curves)}{f'<table class=facts>{cells}</table>' if cells else ''}"
        f"{''.join(_table(table) for table in analysis.tables if table.rows)}"
    )


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    parts = ["<h2>Findings</h2>"] * bool(findings)
    for found in findings:
        rule, severity = escape(str(found["rule"])), escape(str(found["severity"]))
        message, remedy = _prose(str(found["message"])), _prose(str(found["remedy"]))
        parts.append(f"<p><b class={severity}>{rule}</b> ({severity}): {message}<br>{remedy}</p>")
    return "".join(parts)


def _prose(text: str) -> str:
    return "".join(f"<code>{escape(part)}</code>" if is_code else escape(part) for part, is_code in prose(text))


def shown(value: object) -> str:
    """A table cell: a compact number, or escaped text."""
    return number(value) if isinstance(value, int | float) else escape(str(value))


def _table(table: Table) -> str:
    drawn = table.columns.index(table.drawn) if table.drawn else -1
    numbers = [float(row[drawn]) for row in table.rows if float(row[drawn]) > 0] if table.drawn else []
    finite = [value for value in numbers if math.isfinite(value)]
    largest, smallest = max(finite, default=0.0), min(finite, default=0.0)

    def cell(place: int, value: str | float, tag: str) -> str:
        kind = "" if isinstance(table.rows[0][place], str) else " class=n"
        picture = bar(float(value), largest, smallest) if place == drawn and tag == "td" else ""
        return f"<{tag}{kind}>{shown(value)}</{tag}>{f'<{tag}>{picture}</{tag}>' if place == drawn else ''}"

    lines = [(table.columns, "th"), *((row, "td") for row in table.rows)]
    body = (f"<tr>{''.join(cell(place, value, tag) for place, value in enumerate(line))}</tr>" for line, tag in lines)
    return f"<table>{''.join(body)}</table>"


def line_chart(curves: Mapping[str, Curve]) -> str:
    """Draw curves with their names, with gaps at missing values; "" if there is nothing to draw."""
    numbers = [value for _, values in curves.values() for value in values if math.isfinite(value)]
    steps = [step for steps, _ in curves.values() for step in steps]
    if len(numbers) < 2 or max(steps) == min(steps):
        return ""
    low, high = min(numbers), max(numbers)
    high = high if high > low else low + 1.0
    first, last = min(steps), max(steps)

    def place(step: int, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT) * (step - first) / (last - first)
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<polyline class="c{number}" points="{" ".join(part)}"/>'
        for number, (steps, values) in enumerate(curves.values())
        for part in _parts([place(s, v) if math.isfinite(v) else None for s, v in zip(steps, values, strict=True)])
    ]
    names = "".join(f'<span class="c{i}">{escape(name)}</span>' for i, name in enumerate(curves))
    floor = _HEIGHT - _BOTTOM
    axes = (
        f'<path d="M{_LEFT} {_TOP}V{floor}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{_LEFT - 6}" y="{floor}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">step {first:,}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 5}" text-anchor="end">{last:,}</text>'
    )
    title = escape(f"{', '.join(curves)}, steps {first} to {last}, {low:.3g} to {high:.3g}")
    return (
        f'<figure><figcaption>{names}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{title}">{axes}{"".join(lines)}</svg></figure>'
    )


def bar(value: float, largest: float, smallest: float) -> str:
    """A bar for a cell; logarithmic if the values span decades."""
    if not (math.isfinite(value) and largest > 0 and value > 0):
        return ""
    share = value / largest
    if smallest > 0 and largest / smallest > 100:
        share = 0.05 + 0.95 * math.log(value / smallest) / math.log(largest / smallest)
    return f'<i class="bar" style="width:{100 * share:.0f}px"></i>'


def _parts(points: Sequence[str | None]) -> list[list[str]]:
    """Runs of points without gaps; a single point is drawn as a dot."""
    parts: list[list[str]] = [[]]
    for point in points:
        if point is not None:
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part * 2 if len(part) == 1 else part for part in parts if part]
