"""`sonde diagnose RUN`: what is wrong, the most likely root first, with what it brought about folded under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from rich.console import Console

    from sonde.diagnose.diagnosis import Diagnosis
    from sonde.run import Run

NUM_NOTES: Final = 3


def diagnose(
    run: RunName = "latest",
    all: Annotated[bool, typer.Option("--all", help="Unfold everything: symptoms and remarks in full.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Say what is wrong with a run, where, since when and what to do.

    The most likely root cause first, with the numbers that show it and what it brought about. The exit code is 1 when
    something critical was found.

    \b
    Examples:
      sonde diagnose latest
      sonde diagnose gpt/baseline --all
      sonde diagnose latest --json || echo "do not keep this one"
    """
    from sonde.show.diagnosis import diagnosis_dict

    found_run = open_run(run, dir)
    found = found_run.diagnosis()
    if json:
        print_json(diagnosis_dict(found_run, found))
    else:
        _draw(found_run, found, unfold=all)
    raise typer.Exit(1 if found.is_critical else 0)


def _draw(run: Run, found: Diagnosis, *, unfold: bool) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.finding import FindingNote

    console = make_console()
    roots, remarks = found.roots, found.remarks
    if not roots and not (unfold and remarks):
        _draw_silence(console, run, found)
        return
    _draw_head(console, run, found)
    notes = [*roots, *remarks] if unfold else roots[:NUM_NOTES]
    for finding in notes:
        console.print()
        console.print(FindingNote(finding, found.window, unfold=unfold))
    console.print()
    if not unfold:
        _draw_rest(console, found)
    _draw_foot(console, run, found)


def _draw_silence(console: Console, run: Run, found: Diagnosis) -> None:
    from rich.text import Text

    from sonde.show.diagnosis import health_of, what_was_checked

    name = f"{plain(run.project)}/{plain(run.name)}"
    if run.last_step < 0:
        console.print(f"{name}: nothing is recorded, so nothing can be said.")
        return
    health = health_of(found)
    score = "" if health is None else f" (health {health:.0f} of 100)"
    remarks = f" {_remarks(found)}" if found.remarks else ""
    line = Text(f"{name}: ", style="bold")
    line.append("nothing is wrong", style="not bold green")
    line.append(f"{score}; {plain(what_was_checked(found))}.{remarks}", style="not bold")
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


def _draw_rest(console: Console, found: Diagnosis) -> None:
    """What was left out, a line each for findings and a count for remarks."""
    from sonde.show.term.finding import span
    from sonde.show.term.table import Column, severity_text, table

    rest = found.roots[NUM_NOTES:]
    if rest:
        columns = [Column(""), Column("also found"), Column(""), Column("", wrap=True)]
        console.print(table(columns, [(severity_text(f.severity), f.rule, span(f), f.message) for f in rest]))
    if found.remarks:
        console.print(_remarks(found), style="dim")


def _remarks(found: Diagnosis) -> str:
    from sonde.show.diagnosis import counts_in_words

    return f"{counts_in_words({'info': len(found.remarks)})}; show with --all."


def _draw_foot(console: Console, run: Run, found: Diagnosis) -> None:
    from sonde.show.diagnosis import what_was_checked

    console.print(plain(what_was_checked(found)[0].upper() + what_was_checked(found)[1:] + "."), style="dim")
    for warning in run.warnings:
        console.print(f"! {plain(warning)}", style="yellow")
    first = found.roots[0] if found.roots else found.remarks[0]
    console.print(f"look:  sonde show {plain(run.id)} --at {max(first.step, 0)}", style="dim")
