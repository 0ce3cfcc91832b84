"""Text for a run and its findings, shared by the screen and `--once`."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.text import Text

from sonde.diagnose.finding import MARKS
from sonde.diagnose.health import grade
from sonde.show.monitor.frame import Frame, Worst
from sonde.show.term.finding import ASCII_MARKS
from sonde.show.term.number import age, number
from sonde.show.term.sparkline import sparkline
from sonde.show.term.table import SEVERITY_STYLES, status_text
from sonde.show.term.text import plain


def title(frame: Frame) -> Text:
    """Name, status, step, speed, loss and health."""
    run = frame.run
    if run is None:
        return Text("no run yet", style="bold yellow")
    parts = [Text(plain(run.label), style="bold"), status_text(run.status)]
    parts.append(Text(f"step {run.last_step:,}" if run.last_step >= 0 else "no steps yet"))
    if frame.rate is not None and run.status == "running":
        parts.append(Text(f"{frame.rate.last:.3g} steps/s"))
    if frame.loss is not None and frame.losses:
        loss = frame.losses[0]
        parts.append(Text(f"{plain(loss.name, 20)} {number(loss.last)}"))
    if frame.health is not None:
        parts.append(Text(f"health {frame.health:.0f}", style=health_style(frame.health)))
    if run.status == "running" and frame.age_s is not None and frame.age_s > 10:
        parts.append(Text(f"last heartbeat {age(frame.age_s)}", style="yellow"))
    return Text("  ").join(parts)


def health_style(score: float) -> str:
    return {**SEVERITY_STYLES, "info": "green"}[grade(score)]


def finding_line(finding: dict[str, Any], *, ascii: bool = False) -> Text:
    """A finding and its first step, in one line."""
    severity = str(finding["severity"])
    style = SEVERITY_STYLES.get(severity, "")
    symptom = "  " if finding.get("caused_by") else ""
    text = Text(symptom).append((ASCII_MARKS if ascii else MARKS).get(severity, "?") + " ", style=style)
    text.append(plain(finding["rule"]), style=f"bold {style}".strip())
    return text.append(f" {finding['step']:,}  ", style="dim").append(plain(finding["message"]))


def finding_lines(finding: dict[str, Any], width: int) -> Text:
    """A finding in two lines of a narrow list: rule and first step, then as much of the message as fits."""
    severity = str(finding["severity"])
    style = SEVERITY_STYLES.get(severity, "")
    margin = "  " if finding.get("caused_by") else ""
    text = Text(margin).append(f"{MARKS.get(severity, '?')} ", style=style)
    text.append(plain(finding["rule"]), style=f"bold {style}".strip()).append(f" {finding['step']:,}", style="dim")
    return text.append(f"\n{margin}  {plain(finding['message'], max(width - 3 - len(margin), 8))}")


def fitted(name: str, width: int) -> str:
    """Shorten the name of a site: first the parameter to one letter, then parent modules, then cut the start.

    >>> fitted("layers.11.attn.q_proj.weight", 25)
    'layers.11.attn.q_proj.w'
    >>> fitted("layers.11.attn.q_proj.weight", 15)
    'l.11.a.q_proj.w'
    """
    text = plain(name)
    if len(text) > width:
        text = text.replace(".weight", ".w").replace(".bias", ".b")
    parts = text.split(".")
    for place in range(len(parts) - 2):  # except the module itself
        if len(text) > width and not parts[place][:1].isdigit():
            parts[place] = parts[place][:1]
            text = ".".join(parts)
    return text if len(text) <= width else f"…{text[-(width - 1) :]}"


def finding_note(finding: dict[str, Any]) -> Text:
    """A finding in full: message, sites, evidence, fix."""
    text = finding_line(finding)
    for one in finding.get("evidence", []):
        text.append(
            f"\n  {number(one['value']) if isinstance(one['value'], int | float) else one['value']}", style="bold"
        )
        text.append(f"  {plain(one.get('meaning') or one.get('series', ''))}")
        if one.get("healthy"):
            text.append(f"   healthy: {plain(one['healthy'])}", style="green")
    if finding.get("caused_by"):
        text.append(f"\n  caused by {plain(finding['caused_by'])}", style="dim")
    for line in str(finding.get("remedy") or "").splitlines():
        text.append("\n  fix  ", style="dim").append(plain(line), style="green")
    return text


def worst_cells(worst: Worst, width: int = 10, *, ascii: bool = False) -> tuple[Text, Text, Text, Text]:
    """Cells for the name, the value, its ratio to the median, and the history."""
    is_odd = worst.odd_step is not None
    name = Text(plain(worst.site.partition("/")[2]), style="bold red" if is_odd else "")
    history = worst.history[np.isfinite(worst.history)]
    if len(history) and (history > 0).all() and history.max() > 100 * history.min():
        history = np.log10(history)
    shape = Text(sparkline(history, width, ascii=ascii), style="cyan")
    return name, Text(number(worst.value)), Text(_relative(worst), style="red" if is_odd else ""), shape


def _relative(worst: Worst) -> str:
    if worst.odd_step is not None:
        return f"NaN @ {worst.odd_step:,}"
    return "–" if np.isnan(worst.times_median) else f"{worst.times_median:.2g}×"
