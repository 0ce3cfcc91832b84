"""A run whose data was deleted, or that has none, is not called healthy in any view."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sonde import init as start_run
from sonde.errors import CorruptError
from sonde.run import Run
from sonde.show.notebook.card import card
from sonde.show.web.caches.diagnoses import judge
from sonde.show.web.caches.run_summaries import make_brief
from sonde.show.web.runs import Entry, run_key

HEALTHY = {"diagnosis": {"critical": 0, "warning": 0, "info": 0, "health": 100.0}}


def entry(path: Path) -> Entry:
    return Entry(run_key(path), path, path.parent)


@pytest.fixture
def healthy(make_run: Any) -> Path:
    path: Path = make_run(facts=HEALTHY)
    return path


@pytest.fixture(params=["catalog", "stats folder", "a segment", "everything"])
def lost(request: Any, healthy: Path) -> Path:
    """A run that was healthy while it trained, without some of its files."""
    if request.param == "catalog":
        (healthy / "catalog.sqlite").unlink()
    elif request.param == "stats folder":
        shutil.rmtree(healthy / "stats")
    elif request.param == "a segment":
        next((healthy / "stats").rglob("seg-*.parquet")).unlink()
    else:
        for path in [path for path in healthy.rglob("*") if path.is_file() and path.name != "run.json"]:
            path.unlink()
    return healthy


def test_with_its_data_it_is_healthy_everywhere(healthy: Path, sonde: Any) -> None:
    (row,) = sonde("list", "--json").json
    assert (row["health"], row["findings"]["critical"], row["warnings"]) == (100.0, 0, [])
    assert "health 100" in sonde("show").stdout
    brief = make_brief(entry(healthy), Run(healthy))
    assert (brief["health"], brief["findings"]["critical"]) == (100.0, 0)


def test_list_says_unknown(lost: Path, sonde: Any) -> None:
    (row,) = sonde("list", "--json").json
    assert (row["health"], row["findings"]) == (None, None)
    assert "missing" in " ".join(row["warnings"])


def test_show_says_unknown_or_why_it_cannot(lost: Path, sonde: Any) -> None:
    code = int(not (lost / "catalog.sqlite").exists())
    answer = sonde("show", code=code)
    assert "health" not in answer.stdout
    assert "missing" in answer.stderr if code else "findings   unknown" in answer.stdout


@pytest.mark.parametrize("verb", [["diagnose"], ["report", "-f", "md", "-o", "-"], ["report", "-f", "txt", "-o", "-"]])
def test_verdicts_are_refused(verb: list[str], lost: Path, sonde: Any) -> None:
    answer = sonde(*verb, code=1)
    assert "missing" in answer.stderr
    assert answer.stdout == ""


def test_monitor_gives_no_health(lost: Path, sonde: Any) -> None:
    if (lost / "catalog.sqlite").exists():
        answer = sonde("monitor", "latest", "--once").stdout
        assert "health" not in answer
        assert "nothing recorded to check" in answer


def test_dashboard_and_card_say_unknown(lost: Path) -> None:
    brief = make_brief(entry(lost), Run(lost))
    assert (brief["health"], brief["findings"]) == (None, None)
    with pytest.raises(CorruptError, match="missing"):
        judge(entry(lost), Run(lost))
    shown = card(Run(lost))
    assert "Health unknown" in shown
    assert "Findings unknown" in shown
    assert "No problems" not in shown


def test_a_run_without_anything_to_check_is_not_judged(sonde: Any) -> None:
    with start_run(project="gpt", name="accuracy", verbose=False) as session:
        for step in range(20):
            session.log({"accuracy": 0.1}, step=step)
    path, verdict = Path(session.path), "nothing was recorded that the rules could check"
    assert verdict in sonde("diagnose").stdout
    assert verdict.capitalize() in sonde("report", "-f", "md", "-o", "-").stdout
    assert "nothing recorded to check" in sonde("monitor", "latest", "--once").stdout
    assert "findings   unknown" in sonde("show").stdout
    assert judge(entry(path), Run(path)).is_blind
    assert make_brief(entry(path), Run(path))["findings"] is None
    assert "Findings unknown" in card(Run(path))
