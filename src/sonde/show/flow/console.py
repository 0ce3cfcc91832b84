"""A flow report on the terminal and as plain text, without colours in a pipe or with NO_COLOR."""

from __future__ import annotations

import io
import math
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sonde.show.flow.issue import Issue
from sonde.show.flow.metrics import WORDS
from sonde.show.flow.result import FlowResult
from sonde.show.term.number import counted

_COLOURS: Final = {
    "HEALTHY": "green", "WARNING": "yellow", "CRITICAL": "bold red", "HIGH": "red", "MEDIUM": "yellow", "LOW": "dim",
}  # fmt: skip
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"


def print_summary(report: FlowResult, *, limit: int | None = 5, more: str = "report.print_issues()") -> None:
    """Print a summary. `limit`: maximum number of issues (None: all); `more`: how to show the rest."""
    # Lines of code are not broken: a terminal wraps them, and a pipe keeps them on one line.
    Console(highlight=False).print(_summary(report, limit, more), soft_wrap=True)


def print_layers(report: FlowResult) -> None:
    Console(highlight=False).print(_layers(report))


def print_issues(report: FlowResult) -> None:
    Console(highlight=False).print(_issues(report), soft_wrap=True)


def as_text(report: FlowResult, width: int = 110) -> str:
    """The full report as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, force_terminal=False)
    console.print(_summary(report), soft_wrap=True)
    console.print(_layers(report))
    console.print(_issues(report), soft_wrap=True)
    return out.getvalue()


def pressure_line(report: FlowResult) -> str:
    """Relative pressure of each layer from input to output, one decade per eighth of a block; a full block is 10×."""
    levels = [layer.metrics.relative_pressure for layer in report.layers if layer.is_leaf]
    heights = [0 if level <= 0 else round(min(8, max(1, 7 + math.log10(level)))) for level in levels]
    return "".join(_BLOCKS[height] for height in heights)


def _summary(report: FlowResult, limit: int | None = 5, more: str = "report.print_issues()") -> RenderableType:
    counts = {
        status: sum(la.health.status == status for la in report.layers) for status in ("HEALTHY", "WARNING", "CRITICAL")
    }
    score = f"{report.health:.0f}/100 {report.status}"
    head = Text.assemble(
        (report.model_name, "bold"), "   health ", (score, _COLOURS[report.status]),
        f"   loss {report.loss:.4g}   ", f"{counted(len(report.layers), 'module')}: ",
        ", ".join(f"{n} {status.lower()}" for status, n in counts.items() if n),
    )  # fmt: skip
    lines: list[RenderableType] = [head]
    if len(report.layers) <= 120:
        lines.append(
            Text.assemble(
                ("input ", "dim"), pressure_line(report), (" output   pressure (gradient size) along the depth", "dim")
            )
        )
    if report.issues:
        lines.append(_issues(report, limit, more))
    else:
        lines.append(Text("No issues: gradients reach every layer, and no layer stands out.", style="green"))
    return Group(*lines)


def _layers(report: FlowResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", caption=WORDS, caption_justify="left")
    for name in ("layer", "type"):
        table.add_column(name, overflow="fold")
    is_moving = any(layer.metrics.velocity for layer in report.layers)  # known only after several passes
    columns = (
        "score",
        "relative",
        "pressure",
        "max",
        "turbulence",
        *(("velocity",) if is_moving else ()),
        "grad/weight",
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for layer in report.layers:
        m = layer.metrics
        table.add_row(
            Text(layer.name), Text(layer.type), Text(f"{layer.health.score:.0f}", style=_COLOURS[layer.health.status]),
            f"{m.relative_pressure:.2g}", f"{m.mean_pressure:.2e}", f"{m.max_pressure:.2e}", f"{m.turbulence:.2g}",
            *((f"{m.velocity:.2g}",) if is_moving else ()),
            f"{m.weight_ratio:.2e}" if m.weight_norm else "",
        )  # fmt: skip
    return table


def _issues(report: FlowResult, limit: int | None = None, more: str = "") -> RenderableType:
    shown = report.issues[:limit]
    parts: list[RenderableType] = [_issue(issue) for issue in shown]
    left = len(report.issues) - len(shown)
    if left:
        parts.append(Text(f"… and {left} more: {more}", style="dim"))
    return Group(*parts) if parts else Text("No issues.")


def _issue(issue: Issue) -> Text:
    text = Text.assemble((f"{issue.severity:8}", _COLOURS[issue.severity]), f" {issue.type}  {issue.message}")
    if issue.healthy:
        text.append(f"  (healthy: {issue.healthy})", style="dim")
    for line in issue.recommendation.splitlines():
        text.append(f"\n           {line}", style="cyan")
    return text
