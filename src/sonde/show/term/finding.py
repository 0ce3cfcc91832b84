"""A finding on the terminal: message, evidence, fix, confidence and consequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from sonde.diagnose.check import all_rules
from sonde.diagnose.finding import MARKS, Evidence, Finding, span
from sonde.schema.window import Window
from sonde.show.term.console import is_ascii
from sonde.show.term.number import number
from sonde.show.term.sparkline import sparkline
from sonde.show.term.table import SEVERITY_STYLES
from sonde.show.term.text import plain

ASCII_MARKS: Final = {"critical": "x", "warning": "!", "info": "-"}
SPARK_WIDTH: Final = 40
NUM_FOLDED: Final = 8
NUM_LINES: Final = 6
"""Lines of a traceback, unless everything is shown."""
_LABEL: Final = 13


class FindingNote:
    """One finding, followed by its symptoms: one line each, or in full with `unfold`."""

    def __init__(self, finding: Finding, window: Window, *, unfold: bool = False, indent: int = 0) -> None:
        self.finding, self.window, self.unfold, self.indent = finding, window, unfold, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line, hang in self._lines(options.max_width - self.indent, ascii=is_ascii(console)):
            for index, part in enumerate(_wrapped(console, line, options.max_width - self.indent, hang)):
                yield Text(" " * (self.indent + (hang if index else 0))).append_text(part)
        if self.unfold:
            for symptom in self.finding.cause_of:
                yield Text()
                yield FindingNote(symptom, self.window, unfold=True, indent=self.indent + _LABEL + 2)

    def _lines(self, width: int, *, ascii: bool) -> Iterator[tuple[Text, int]]:
        """Lines, each with the indent of its continuation."""
        finding = self.finding
        yield _headline(finding, ascii=ascii), 2
        yield Text(f"  {plain(finding.message)}"), 2
        if finding.evidence:
            yield from self._picture(finding.evidence[0], width, ascii=ascii)
        for index, item in enumerate(finding.evidence):
            yield _number(item, is_first=not index), _LABEL + 2
        yield from _labelled("traceback", _tail(finding.traceback, is_whole=self.unfold), style="dim")
        yield from _labelled("fix", finding.remedy, style="green")
        label = "reference" if len(finding.references) == 1 else "references"
        yield from _labelled(label, "; ".join(finding.references), style="dim")
        yield from _labelled(
            "more", f"sonde explain {finding.rule}" if finding.rule in all_rules() else "", style="dim"
        )
        if not self.unfold:
            yield from self._folded(width)

    def _picture(self, evidence: Evidence, width: int, *, ascii: bool) -> Iterator[tuple[Text, int]]:
        steps, values = self.window.get(evidence.series)
        if len(values) >= 3:
            text = Text("  ").append(sparkline(values, min(SPARK_WIDTH, max(width - 4, 8)), ascii=ascii), style="cyan")
            text.append(f"  {plain(evidence.series)}, steps {int(steps[0]):,} to {int(steps[-1]):,}", style="dim")
            yield text, 2

    def _folded(self, width: int) -> Iterator[tuple[Text, int]]:
        symptoms = self.finding.cause_of
        for index, symptom in enumerate(symptoms[:NUM_FOLDED]):
            text = Text().append(f"  {'also caused' if not index else '':<{_LABEL}}", style="dim")
            text.append(plain(symptom.rule)).append(f"  {plain(symptom.message)}", style="dim")
            text.truncate(width, overflow="ellipsis")
            yield text, 0
        if len(symptoms) > NUM_FOLDED:
            more = len(symptoms) - NUM_FOLDED
            yield Text(f"  {'':<{_LABEL}}and {more} more; show all with --all", style="dim"), 0


def _tail(traceback: str, *, is_whole: bool) -> str:
    """The end of a traceback: the lines closest to the error."""
    lines = traceback.splitlines()
    return "\n".join(lines if is_whole else lines[-NUM_LINES:])


def _number(evidence: Evidence, *, is_first: bool) -> Text:
    """A number and its healthy range. The series of the first one is already named next to its sparkline."""
    text = Text("  ").append(f"{number(evidence.value):<{_LABEL}}", style="bold")
    text.append(plain(evidence.meaning or evidence.series))
    if evidence.meaning and evidence.series and not is_first:
        text.append(f", {plain(evidence.series)}", style="dim")
    if evidence.step is not None:
        text.append(f" at step {evidence.step:,}", style="dim")
    if evidence.healthy:
        text.append(f"   healthy: {plain(evidence.healthy)}", style="green")
    return text


def _labelled(label: str, content: str, style: str) -> Iterator[tuple[Text, int]]:
    for index, line in enumerate(content.splitlines()):
        text = Text("  ").append(f"{label if not index else '':<{_LABEL}}", style="dim")
        yield text.append(plain(line), style=style), _LABEL + 2


def _wrapped(console: Console, line: Text, width: int, hang: int) -> list[Text]:
    """Wrap a line to the width, with continuation lines shortened by the indent. Nothing is padded."""
    first = line.wrap(console, max(width, 8))
    if len(first) == 1:
        return [first[0]]
    rest = line[len(first[0].plain) :]
    rest = rest[len(rest.plain) - len(rest.plain.lstrip()) :]
    return [first[0], *rest.wrap(console, max(width - hang, 8))]


def _headline(finding: Finding, *, ascii: bool) -> Text:
    severity = str(finding.severity)
    style = SEVERITY_STYLES.get(severity, "")
    text = Text().append(f"{(ASCII_MARKS if ascii else MARKS)[severity]} ", style=style)
    text.append(plain(finding.rule), style=f"bold {style}".strip())
    text.append(f"  {severity}, confidence {100 * finding.confidence:.0f} %, {span(finding)}", style="dim")
    return text
