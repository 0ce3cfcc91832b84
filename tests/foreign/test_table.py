"""The table shows what failed, what was not compared and what did not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from comparison import Comparison
from examination import FOLDER_VARIABLE, Answers, record
from outcomes import DID_NOT_RUN, Outcome, note
from zoo_table import main

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def line_of(table: str, name: str) -> str:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return line


def test_an_entry_that_passes_says_how_much_was_compared(folder: Path) -> None:
    values = Comparison(num_series=30, num_values=4_000)
    record(Answers("Net", "models", num_identical=12, values=values, num_steps=40, num_parameters=1_234))
    table = main(folder)
    assert line_of(table, "Net") == "| Net | 40 | 1,234 | yes (12) | 4,000 of 30 series | none | none |"
    assert "1 of 1 entries pass; 4,000 values compared; 0 known false alarms; 0 other tests failed" in table


def test_what_is_wrong_is_shown_as_wrong(folder: Path) -> None:
    values = Comparison(different=["grad/0.weight/rms at step 3"], num_series=1, num_values=9)
    answers = Answers("Net", "models", ["param 0.weight"], 12, values=values, known_findings=("dead_relu",))
    answers.warnings, answers.findings = ["sonde: careful"], ["lr_too_high: it is"]
    record(answers)
    table = main(folder)
    cells = [
        "**no** (1 of 12)",
        "9 of 1 series, **1 wrong**",
        "**1**",
        "**lr_too_high**, **dead_relu (known) is gone**",
    ]
    assert line_of(table, "Net") == f"| Net | 0 | 0 | {' | '.join(cells)} |"
    assert "0 of 1 entries pass" in table


def test_what_was_not_compared_is_said(folder: Path) -> None:
    record(Answers("nothing", "models"))
    values = Comparison(num_values=40, not_compared=["act", "grad"])
    record(Answers("less", "models", num_identical=3, identity_of="losses", values=values))
    table = main(folder)
    assert line_of(table, "nothing") == "| nothing | 0 | 0 | not compared | not compared | none | none |"
    assert "| yes (3: losses) | 40, scalars only, without act, grad |" in line_of(table, "less")


def test_tests_without_an_answer_are_named(folder: Path) -> None:
    record(Answers("Net", "models", warnings=["sonde: careful"]))
    note(Outcome("test_a", "failed", "RuntimeError: no"), folder)
    note(Outcome("test_b", "skipped", "timm is not installed: make zoo"), folder)
    note(Outcome("test_c", DID_NOT_RUN), folder)
    note(Outcome("test_d", "passed"), folder)
    note(Outcome("test_d", DID_NOT_RUN), folder, is_new=False)
    note(Outcome("test_e", "failed", "AssertionError", entries=("Net",)), folder)
    table = main(folder)
    assert line_of(table, "test_a") == "| test_a | **failed** | RuntimeError: no |"
    assert line_of(table, "test_b") == "| test_b | **skipped** | timm is not installed: make zoo |"
    assert line_of(table, "test_c") == f"| test_c | **{DID_NOT_RUN}** |  |"
    assert "test_d" not in table, "it passed"
    assert "test_e" not in table, "its row says what is wrong"
    assert "3 other tests failed, were skipped or did not run" in table


def test_the_packages_are_named_with_their_versions(folder: Path) -> None:
    import torch

    assert f"torch {torch.__version__.partition('+')[0]}" in main(folder)
