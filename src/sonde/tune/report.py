"""The standard report of a fine-tuning run: four questions, each with an answer in words and the numbers behind it."""

from __future__ import annotations

import html
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sonde.schema.records import to_json
from sonde.tune.charts import Curve, bar, line_chart

_MAX_ROWS = 12
"""Of a table in text."""

_META = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
_STYLE = (
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


@dataclass(frozen=True, slots=True)
class Section:
    """One question: a verdict in a sentence, facts, rows for a table, and curves over the steps."""

    title: str
    verdict: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    drawn: str = ""
    """The column of the rows that is drawn as bars."""


@dataclass(frozen=True, slots=True)
class StandardReport:
    """`text` to read, `as_dict()` to compute with, `save("report.html")` to send."""

    name: str
    convergence: Section
    gradient_flow: Section
    weight_evolution: Section
    overfitting: Section
    findings: list[dict[str, Any]]
    adapters: Section | None = None

    @property
    def sections(self) -> list[Section]:
        found = [self.convergence, self.gradient_flow, self.weight_evolution, self.overfitting]
        return found if self.adapters is None else [*found, self.adapters]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        lines = [self.name, "=" * len(self.name)]
        for section in self.sections:
            lines += ["", section.title, "-" * len(section.title), section.verdict]
            lines += [f"  {name}: {_shown(value)}" for name, value in section.facts.items()]
            lines += _aligned(section.rows[:_MAX_ROWS])
            if section.rows[_MAX_ROWS:]:
                lines.append(f"  and {len(section.rows) - _MAX_ROWS} more, in the .html and .json reports")
        if self.findings:
            lines += ["", "Findings", "--------"]
            lines += [f"  {f['severity']}  {f['rule']}: {f['message']}\n      {f['remedy']}" for f in self.findings]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.text

    @property
    def html(self) -> str:
        """One page that needs nothing else."""
        parts = [f"<h1>{html.escape(self.name)}</h1>"]
        for section in self.sections:
            parts.append(f"<h2>{html.escape(section.title)}</h2><p class=verdict>{html.escape(section.verdict)}</p>")
            parts.append(line_chart(section.curves))
            if section.facts:
                cells = "".join(
                    f"<tr><td>{html.escape(name)}</td><td>{html.escape(_shown(value))}</td></tr>"
                    for name, value in section.facts.items()
                )
                parts.append(f"<table class=facts>{cells}</table>")
            if section.rows:
                parts.append(_table(section.rows, section.drawn))
        if self.findings:
            parts.append("<h2>Findings</h2>")
            parts += [
                f"<p><b class={html.escape(str(f['severity']))}>{html.escape(str(f['rule']))}</b> "
                f"({html.escape(str(f['severity']))}): {html.escape(str(f['message']))}<br>"
                f"{html.escape(str(f['remedy']))}</p>"
                for f in self.findings
            ]
        title = html.escape(self.name)
        head = f"{_META}<title>{title}</title><style>{_STYLE}</style>"
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'

    def save(self, path: str | Path) -> Path:
        """As .html, .json or .txt, by its ending."""
        target = Path(path)
        made = {".html": lambda: self.html, ".json": lambda: to_json(self.as_dict()), ".txt": lambda: self.text}
        if target.suffix not in made:
            from sonde.errors import UsageError

            raise UsageError(f"a report is saved as {', '.join(made)}; got {target.name!r}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(made[target.suffix](), encoding="utf-8")
        return target


def _table(rows: list[dict[str, Any]], drawn: str) -> str:
    names = list(rows[0])
    numbers = [float(row[drawn]) for row in rows if row.get(drawn) and math.isfinite(row[drawn])] if drawn else []
    largest, smallest = max(numbers, default=0.0), min(numbers, default=0.0)

    def cell(name: str, value: Any) -> str:
        kind = "" if isinstance(value, str) else " class=n"
        picture = f"<td>{bar(value, largest, smallest)}</td>" if name == drawn else ""
        return f"<td{kind}>{html.escape(_shown(value))}</td>{picture}"

    head = "".join(
        f"<th{'' if isinstance(rows[0][name], str) else ' class=n'}>{html.escape(name)}</th>"
        + ("<th></th>" if name == drawn else "")
        for name in names
    )
    body = "".join("<tr>" + "".join(cell(name, row.get(name)) for name in names) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _aligned(rows: list[dict[str, Any]]) -> list[str]:
    """A table in text: its head once, numbers to the right."""
    if not rows:
        return []
    names = list(rows[0])
    cells = [names, *([_shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    is_text = [isinstance(rows[0][name], str) for name in names]
    return [
        "  "
        + "  ".join(
            text.ljust(w) if left else text.rjust(w) for text, w, left in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    ]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
