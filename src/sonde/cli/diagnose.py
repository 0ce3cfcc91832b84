"""`sonde diagnose RUN`: the problems of a run, most likely root cause first, or as a table in order of time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_args

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json, remark
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from rich.console import Console

    from sonde.diagnose.diagnosis import Diagnosis
    from sonde.diagnose.finding import Finding
    from sonde.diagnose.mute import Muted
    from sonde.run import Run
    from sonde.schema.mutes import Mute

NUM_NOTES: Final = 3


def diagnose(
    run: RunName = "latest",
    all: Annotated[
        bool, typer.Option("--all", help="Show everything in full, including symptoms and remarks.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="One line per finding in order of time, including symptoms of others.")
    ] = False,
    type: Annotated[
        str | None, typer.Option("--type", "-t", help="Only findings of this type; may be a glob, e.g. '*gradients'.")
    ] = None,
    severity: Annotated[
        str | None, typer.Option("--severity", "-s", help="Minimum severity: info, warning or critical.")
    ] = None,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="Exit with 0 even if a finding is critical.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Diagnose a run and suggest how to fix it.

    Says what went wrong, where, since which step, and how to fix it. The most likely root cause comes first, with its
    evidence and its consequences. The exit code is 1 when a finding shown is critical; muted findings do not count.

    \b
    Examples:
      sonde diagnose latest
      sonde diagnose gpt/baseline --all
      sonde diagnose latest --table --severity warning
      sonde diagnose latest --type "*gradients"
      sonde diagnose latest --json || echo "critical findings"
    """
    filters = _Filters(type, severity)
    filters.check()
    found_run = open_run(run, dir)
    whole = found_run.diagnosis()
    found = replace(whole, findings=tuple(f for f in whole.findings if filters.match(f.rule, f.severity)))
    if table:
        _show_table(found_run, whole, filters, as_json=json)
    else:
        _show_notes(found_run, found, filters, as_json=json, unfold=all)
    raise typer.Exit(1 if found.is_critical and not exit_zero else 0)


class _Filters(NamedTuple):
    """The findings to show; None means any."""

    type: str | None
    severity: str | None

    def check(self) -> None:
        """Reject a severity or a plain type that does not exist; a glob that matches nothing is allowed."""
        from sonde.diagnose.check import all_rules
        from sonde.errors import UnknownNameError
        from sonde.schema.records import Severity

        if self.severity is not None and self.severity not in get_args(Severity):
            raise UnknownNameError("severity", self.severity, get_args(Severity))
        is_glob = self.type is None or any(sign in self.type for sign in "*?[")
        if self.type is not None and not is_glob and self.type not in all_rules():
            raise UnknownNameError("type", self.type, all_rules())

    def match(self, type: str, severity: Any) -> bool:
        from sonde.diagnose.finding import Severity
        from sonde.schema.names import matches

        return (self.type is None or matches(self.type, type)) and Severity(self.severity or "info") <= severity


def _show_table(run: Run, whole: Diagnosis, filters: _Filters, *, as_json: bool) -> None:
    from sonde.show.diagnosis import anomaly_dicts, verdict

    rows = [row for row in anomaly_dicts(whole) if filters.match(row["type"], row["severity"])]
    if as_json:
        print_json(rows)
    elif rows:
        _draw_table(rows)
    elif any(filters):
        _say_no_match(run)
    else:
        remark(f"{run.project}/{run.name}: {verdict(whole)}.")


def _show_notes(run: Run, found: Diagnosis, filters: _Filters, *, as_json: bool, unfold: bool) -> None:
    from sonde.show.diagnosis import diagnosis_dict

    if as_json:
        print_json(diagnosis_dict(run, found))
    elif any(filters) and not found.findings:
        _say_no_match(run)
    else:
        # Whoever asks for remarks, or for one type, wants to see them.
        _draw(run, found, unfold=unfold or (any(filters) and not found.roots))


def _say_no_match(run: Run) -> None:
    remark(f"No findings match these filters in {run.project}/{run.name}.")


def _draw_table(rows: list[dict[str, Any]]) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, severity_text, table

    columns = [
        Column("steps", right=True),
        Column("severity"),
        Column("type"),
        Column("message", wrap=True),
        Column("caused by", style="dim"),
    ]
    cells = [
        (_steps(row), severity_text(row["severity"]), row["type"], row["message"], row["caused_by"] or "")
        for row in rows
    ]
    make_console().print(table(columns, cells))


def _steps(row: dict[str, Any]) -> str:
    first, last = row["step"], row["last_step"]
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _draw(run: Run, found: Diagnosis, *, unfold: bool) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.finding import FindingNote

    console = make_console()
    roots, remarks = found.roots, found.remarks
    if not roots and not (unfold and (remarks or found.muted)):
        _draw_silence(console, run, found)
        return
    _draw_head(console, run, found)
    notes = [*roots, *remarks] if unfold else roots[:NUM_NOTES]
    for finding in notes:
        console.print()
        console.print(FindingNote(finding, found.window, unfold=unfold))
    console.print()
    if unfold:
        _draw_muted(console, found)
    if not unfold:
        _draw_rest(console, found)
    _draw_foot(console, run, found)


def _draw_silence(console: Console, run: Run, found: Diagnosis) -> None:
    from rich.text import Text

    from sonde.show.diagnosis import health_of, verdict, what_was_checked

    name = f"{plain(run.project)}/{plain(run.name)}"
    health = health_of(found)
    score = "" if health is None else f" (health {health:.0f} of 100)"
    remarks = f" {_remarks(found)}" if found.remarks else ""
    line = Text(f"{name}: ", style="bold")
    line.append(verdict(found), style="not bold yellow" if found.is_blind else "not bold green")
    line.append(f"{score}. {plain(what_was_checked(found))}{remarks}", style="not bold")
    console.print(line)


def _draw_head(console: Console, run: Run, found: Diagnosis) -> None:
    from rich.text import Text

    from sonde.show.diagnosis import counts_in_words, health_of
    from sonde.show.term.console import is_ascii
    from sonde.show.term.sparkline import sparkline
    from sonde.show.term.table import status_text

    name = Text(f"{plain(run.project)}/{plain(run.name)}", style="bold")
    parts = [name, status_text(run.status), Text(plain(run.id), style="dim"), Text(counts_in_words(found.counts()))]
    console.print(Text("  ").join(parts))
    health = health_of(found)
    if health is not None:
        line = sparkline(found.health.scores[0], 24, ascii=is_ascii(console), bounds=(0.0, 100.0))
        console.print(Text(f"health {health:.0f} of 100  ").append(line, style="cyan"))


def _draw_muted(console: Console, found: Diagnosis) -> None:
    """Print every muted finding in one line, with the reason."""
    from sonde.show.term.table import Column, severity_text, table

    if found.muted:
        columns = [Column(""), Column("muted"), Column("", wrap=True), Column("reason", wrap=True)]
        rows = [(severity_text(f.severity), f.rule, f.message, m.reason) for f, m in map(_parts, found.muted)]
        console.print(table(columns, rows))


def _parts(one: Muted) -> tuple[Finding, Mute]:
    return one.finding, one.mute


def _draw_rest(console: Console, found: Diagnosis) -> None:
    """Print the remaining findings, one line each, and the number of remarks."""
    from sonde.diagnose.finding import span
    from sonde.show.term.table import Column, severity_text, table

    rest = found.roots[NUM_NOTES:]
    if rest:
        columns = [Column(""), Column("also found"), Column(""), Column("", wrap=True)]
        console.print(table(columns, [(severity_text(f.severity), f.rule, span(f), f.message) for f in rest]))
    if found.remarks:
        console.print(_remarks(found), style="dim")


def _remarks(found: Diagnosis) -> str:
    from sonde.show.diagnosis import counts_in_words

    return f"{counts_in_words({'info': len(found.remarks)})} not shown; add --all to see everything."


def _draw_foot(console: Console, run: Run, found: Diagnosis) -> None:
    from sonde.show.diagnosis import what_was_checked

    console.print(plain(what_was_checked(found)), style="dim")
    for warning in run.warnings:
        console.print(f"! {plain(warning)}", style="yellow")
    first = next(iter([*found.roots, *found.remarks, *(one.finding for one in found.muted)]))
    console.print(f"next:  sonde show {plain(run.id)} --at {max(first.step, 0)}", style="dim")
