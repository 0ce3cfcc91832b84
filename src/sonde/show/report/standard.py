"""The standard report of a run and its checkpoints: the analyses of `sonde report`, and how far weights moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.errors import UsageError
from sonde.run import Run
from sonde.schema.records import to_json
from sonde.show.analyses.analysis import Analysis, Table
from sonde.show.analyses.checkpoints import adapters, weight_evolution, with_checkpoint
from sonde.show.analyses.convergence import convergence
from sonde.show.analyses.gradient_flow import gradient_flow
from sonde.show.analyses.overfitting import overfitting
from sonde.show.report.page import to_page
from sonde.show.term.number import number

FORMATS: Final = ("html", "json", "txt")
MAX_ROWS: Final = 12
"""Maximum number of rows of a table in text."""


@dataclass(frozen=True, slots=True)
class StandardReport:
    """A report: `text` to read, `as_dict()` for programs, `save("report.html")` to share."""

    name: str
    convergence: Analysis
    gradient_flow: Analysis
    weight_evolution: Analysis
    overfitting: Analysis
    findings: list[dict[str, Any]]
    adapters: Analysis | None = None

    @property
    def sections(self) -> list[Analysis]:
        found = [self.convergence, self.gradient_flow, self.weight_evolution, self.overfitting, self.adapters]
        return [section for section in found if section is not None]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values: each section by name, with its facts, rows and curves."""
        names = ("convergence", "gradient_flow", "weight_evolution", "overfitting", "adapters")
        sections = {name: _section_dict(getattr(self, name)) for name in names}
        return {"name": self.name, **sections, "findings": self.findings}

    @property
    def text(self) -> str:
        lines = [self.name, "=" * len(self.name)]
        for section in self.sections:
            lines += ["", section.title, "-" * len(section.title), section.verdict]
            lines += [f"  {name}: {number(value)}" for name, value in section.facts.items()]
            lines += [line for table in section.tables for line in _aligned(table)]
        if self.findings:
            lines += ["", "Findings", "--------"]
            lines += [f"  {f['severity']}  {f['rule']}: {f['message']}\n      {f['remedy']}" for f in self.findings]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.text

    @property
    def html(self) -> str:
        """The report as one self-contained HTML page."""
        return to_page(self.name, self.sections, self.findings)

    def save(self, path: str | Path) -> Path:
        """Save as .html, .json or .txt, according to the extension."""
        target = Path(path)
        if target.suffix[1:] not in FORMATS:
            known = ", ".join(f".{format}" for format in FORMATS)
            raise UsageError(f"cannot tell the report format from {target.name!r}. Use one of {known}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.in_format(target.suffix[1:]), encoding="utf-8")
        return target

    def in_format(self, format: str) -> str:
        """The report as html, json or txt."""
        if format == "json":
            return to_json({"sonde_report": 1, **self.as_dict()})
        return self.html if format == "html" else self.text


def standard_report(
    name: str, run: Run | None, weights: Iterable[tuple[int, Mapping[str, Any]]], saved: Sequence[int]
) -> StandardReport:
    """Make a report from a run (if any), `weights` by step, and the steps at which checkpoints were `saved`."""
    moved = weight_evolution(weights)
    if run is None:
        titles = {"convergence": "Training convergence", "gradient_flow": "Gradient flow", "overfitting": "Overfitting"}
        nothing = {
            key: Analysis(key=key, title=title, tone="unknown", verdict="Not recorded.")
            for key, title in titles.items()
        }
        return StandardReport(name, weight_evolution=moved, findings=[], **nothing)
    window = run.window(())
    return StandardReport(
        name,
        convergence=convergence(window),
        gradient_flow=gradient_flow(run),
        weight_evolution=moved,
        overfitting=with_checkpoint(overfitting(window), saved),
        findings=[finding.as_dict() for finding in run.findings()],
        adapters=adapters(run),
    )


def _section_dict(section: Analysis | None) -> dict[str, Any] | None:
    if section is None:
        return None
    parts = {"title": section.title, "tone": section.tone, "verdict": section.verdict, "facts": section.facts}
    return {**parts, "rows": section.rows, "curves": section.curves}


def _aligned(table: Table) -> list[str]:
    """A table as text, with numbers aligned to the right."""
    rows = table.rows[:MAX_ROWS]
    if not rows:
        return []
    cells = [table.columns, *([cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(table.columns))]
    signs = ["<" if isinstance(cell, str) else ">" for cell in rows[0]]
    lines = [
        "  " + "  ".join(f"{text:{s}{w}}" for text, s, w in zip(line, signs, widths, strict=True)).rstrip()
        for line in cells
    ]
    more = len(table.rows) - MAX_ROWS
    return [*lines, *([f"  and {more} more, in the .html and .json reports"] if more > 0 else [])]
