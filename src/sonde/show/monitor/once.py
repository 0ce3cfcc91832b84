"""A single frame on a console: `sonde monitor --once`. In a pipe it is plain text."""

from __future__ import annotations

from typing import Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from sonde.show.monitor.frame import Frame
from sonde.show.monitor.heat import HeatLook, heat_lines
from sonde.show.monitor.words import finding_line, title, worst_cells
from sonde.show.term.console import is_ascii
from sonde.show.term.number import number
from sonde.show.term.sparkline import sparkline
from sonde.show.term.table import Column, status_text, table
from sonde.show.term.text import plain

MAX_WIDTH: Final = 120
NUM_CURVES: Final = 6
NUM_WORST: Final = 6
HEAT_HEIGHT: Final = 13


def draw(frame: Frame, console: Console) -> RenderableType:
    """All parts of a frame, one below the other."""
    ascii = is_ascii(console)
    width = min(console.width, MAX_WIDTH)
    parts: list[RenderableType] = [title(frame)]
    parts += [Text(plain(text), style="yellow") for text in (frame.reason, frame.problem) if text]
    parts += [Text(f"! {plain(warning)}", style="yellow") for warning in frame.warnings]
    if frame.losses:
        parts += [Text(), _curves(frame, width, ascii=ascii)]
    if frame.run is not None:
        parts += [Text(), *_findings(frame, width, ascii=ascii)]
    if frame.heat is not None:
        colours = console.is_terminal and not console.no_color and console.color_system in ("256", "truecolor")
        look = HeatLook(width, min(HEAT_HEIGHT, len(frame.heat.sites) + 1), has_colours=colours, ascii=ascii)
        parts += [Text(), Text(frame.stat, style="dim"), *heat_lines(frame.heat, look)]
        parts += [Text(), _worst(frame, ascii=ascii)]
    if len(frame.runs) > 1:
        parts += [Text(), _runs(frame)]
    return Group(*parts)


def _curves(frame: Frame, width: int, *, ascii: bool) -> RenderableType:
    curves = [*frame.losses[:NUM_CURVES], *([frame.rate] if frame.rate else [])]
    room = max(min(width - 50, 40), 8)
    rows = [
        (one.name, sparkline(one.values, room, ascii=ascii), number(float(one.values[0])), number(one.last))
        for one in curves
        if len(one.values)
    ]
    columns = [Column("", cut=True), Column("", style="cyan")]
    return table([*columns, *(Column(name, right=True) for name in ("first", "last"))], rows)


def _findings(frame: Frame, width: int, *, ascii: bool) -> list[RenderableType]:
    if not frame.findings:
        summary = "no findings" if frame.is_judged else "no findings during training"
        if frame.is_blind:
            summary = "nothing recorded to check"
        return [Text(f"{summary}; sonde diagnose {frame.run.id if frame.run else ''}", style="dim")]
    lines: list[RenderableType] = []
    for finding in frame.findings:
        text = finding_line(finding, ascii=ascii)
        text.truncate(width, overflow="ellipsis")
        lines.append(text)
    return lines


def _worst(frame: Frame, *, ascii: bool) -> RenderableType:
    rows = [worst_cells(one, 16, ascii=ascii) for one in frame.worst[:NUM_WORST]]
    columns = [Column("stands out", cut=True), Column(frame.stat.rpartition("/")[2], right=True)]
    return table([*columns, Column("× median", right=True), Column("")], rows)


def _runs(frame: Frame) -> RenderableType:
    rows = [(status_text(one.status), one.label, one.id, f"{one.last_step + 1:,}") for one in frame.runs]
    columns = [Column("status"), Column("run", cut=True), Column("id", style="dim")]
    return table([*columns, Column("steps", right=True)], rows)
