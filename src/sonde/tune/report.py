"""The standard report of a fine-tuning run: four questions, each with an answer in words and the numbers behind it."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sonde.schema.records import to_json

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td,th{padding:.15rem .8rem .15rem 0;text-align:left}"
    "h2{margin-top:2rem}.verdict{font-weight:600}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}"
)


@dataclass(frozen=True, slots=True)
class Section:
    """One question: a verdict in a sentence, facts, and rows for a table."""

    title: str
    verdict: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


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
            lines += [f"  {_line(row)}" for row in section.rows[:12]]
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
            facts = [{"": name, " ": value} for name, value in section.facts.items()]
            parts += [_table(rows) for rows in (facts, section.rows) if rows]
        if self.findings:
            parts.append("<h2>Findings</h2>")
            parts += [
                f"<p><b>{html.escape(str(f['rule']))}</b> ({html.escape(str(f['severity']))}): "
                f"{html.escape(str(f['message']))}<br>{html.escape(str(f['remedy']))}</p>"
                for f in self.findings
            ]
        title = html.escape(self.name)
        head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
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


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_shown(row.get(name)))}</td>" for name in names) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _line(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_shown(value)}" for name, value in row.items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
