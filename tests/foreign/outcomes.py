"""The outcome of every test of the zoo, for the table: a test that fails or is skipped before it has answers is named
there, and so is one that was collected and did not run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examination import names_recorded, results_folder

DID_NOT_RUN = "did not run"
FOLDER = results_folder()


class Outcome(NamedTuple):
    """`entries` are the names of what the test recorded."""

    test: str
    outcome: str
    reason: str = ""
    entries: tuple[str, ...] = ()


def note(outcome: Outcome, folder: Path | None = FOLDER, *, is_new: bool = True) -> None:
    """Keep it where a table is being made; with `is_new` false, only if nothing is known of this test."""
    if folder is None:
        return
    file = folder / "outcomes" / f"{re.sub('[^A-Za-z0-9.]+', '-', outcome.test)}.json"
    if is_new or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(outcome._asdict()), encoding="utf-8")


def note_report(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A phase of a test, or the collection of a file. A test is what the first phase that does not pass says."""
    is_test = isinstance(report, pytest.TestReport)
    if report.outcome == "passed" and not (is_test and report.when == "call"):
        return
    entries = tuple(names_recorded) if is_test else ()
    note(Outcome(short(report.nodeid), report.outcome, reason_of(report), entries))


def read(folder: Path) -> list[Outcome]:
    files = sorted((folder / "outcomes").glob("*.json"))
    return [Outcome(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def short(nodeid: str) -> str:
    """Without the folder."""
    return nodeid.removeprefix("tests/foreign/")


def reason_of(report: Any) -> str:
    """In one line, without the paths of the machine."""
    told = report.longrepr
    if told is None:
        return ""
    if isinstance(told, tuple):
        return str(told[2]).removeprefix("Skipped: ")
    crash = getattr(told, "reprcrash", None)
    return (crash.message if crash is not None else str(told).strip().splitlines()[-1]).splitlines()[0]
