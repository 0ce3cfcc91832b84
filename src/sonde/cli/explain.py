"""`sonde explain RULE` prints the page of a rule; `sonde explain RUN [FINDING]` says why a finding was made."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.options import Dir, Json, open_run
from sonde.cli.output import print_json, remark
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.diagnose.explanation import Explanation
    from sonde.run import Run


def explain(
    subject: Annotated[str, typer.Argument(metavar="RULE|RUN", help="A rule, such as dead_relu, or a run.")],
    finding: Annotated[
        str | None, typer.Argument(metavar="FINDING", help="A rule, or a number. Default: the most likely root cause.")
    ] = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Explain a rule, or a finding of a run.

    For a rule: what it looks like, why it happens, how to fix it, its thresholds, when it is wrong and how to mute it.
    This works offline. For a run: the evidence of a finding, the other rules that were considered and the numbers that
    rejected them, and what to record to be more certain.

    \b
    Examples:
      sonde explain dead_relu
      sonde explain latest
      sonde explain latest lr_too_high
      sonde explain gpt/baseline 2 --json
    """
    from sonde.diagnose.check import all_rules

    if finding is None and subject in all_rules():
        _explain_rule(subject, as_json=json)
        return
    run = _run_named(subject, dir, all_rules())
    found = run.diagnosis()
    if not found.findings and finding is None:
        from sonde.show.diagnosis import verdict, what_was_checked

        if json:
            print_json(None)
        remark(f"{run.project}/{run.name}: {verdict(found)}. {what_was_checked(found)}")
        return
    explanation = run.explain(_numbered(finding))
    if json:
        print_json(explanation.as_dict())
    else:
        _draw(run, explanation)


def _run_named(subject: str, dir: Path | None, rules: Collection[str]) -> Run:
    """The run; if there is none, the error suggests a rule of a similar name."""
    from sonde.errors import RunNotFoundError, UsageError, nearest

    try:
        return open_run(subject, dir)
    except RunNotFoundError:
        if hint := nearest(subject, rules):
            raise UsageError(f'no rule or run "{subject}".{hint}') from None
        raise


def _numbered(finding: str | None) -> str | int:
    """The finding to explain: findings are counted from 1."""
    return 1 if finding is None else int(finding) if finding.isdigit() else finding


def _explain_rule(name: str, *, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.markdown import Markdown

    from sonde.diagnose.page import page, rule_named, thresholds
    from sonde.show.term.console import make_console

    text = page(name)
    if as_json:
        rule = rule_named(name)
        print_json(
            {
                "rule": name,
                "severity": str(rule.severity),
                "needs": list(rule.needs),
                "causes": list(rule.causes),
                "references": list(rule.references),
                "thresholds": [asdict(one) for one in thresholds(name)],
                "page": text,
            }
        )
        return
    console = make_console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text, end="")


def _draw(run: Run, explanation: Explanation) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.finding import FindingNote

    console = make_console()
    console.print(f"{plain(run.project)}/{plain(run.name)}", style="bold")
    console.print(FindingNote(explanation.finding, run.window(), unfold=True))
    console.print()
    for line in explanation.lines():
        console.print(plain(line), style=None if line.startswith("  ") else "bold", markup=False)
