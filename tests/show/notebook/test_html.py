"""What a notebook shows for each result: the right things, as text and never as markup from a run."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import sonde
from sonde.diagnose.finding import Chart, Evidence, Finding, Severity
from sonde.diagnose.findings import Findings
from sonde.distribution import DOCS_URL
from sonde.run import Runs, Table

HOSTILE = "<img src=x onerror=alert(1)>\"'<!--</style></svg>`x`"


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.depth = 0
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {str(value) for name, value in attrs if name == "href"}
        self.depth += tag != "br"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(result: Any) -> Elements:
    """The elements of a result, after checking that nothing in it can run, load or spill."""
    html = result._repr_html_()
    assert html.startswith('<div class="sonde-card">')
    elements = Elements(html)
    assert not {"script", "img", "iframe", "link", "object"} & set(elements.tags)
    assert not [name for name in elements.attributes if name.startswith("on") or name == "src"]
    assert all(link.startswith(f"{DOCS_URL}/rules/") for link in elements.links), "only pages about rules are linked"
    assert elements.depth == 0, "every element that is opened is closed"
    return elements


def finding(**fields: Any) -> Finding:
    chart = Chart("loss", np.arange(10), np.linspace(1, 2, 10))
    known = {"severity": Severity.CRITICAL, "confidence": 0.9, "step": 3, "last_step": 7, "chart": chart}
    return Finding(**{"rule": "nan_inf", "message": "It broke.", **known, **fields})


# ------------------------------------------------------------------------------------------------------------- findings


def test_finding_shows_severity_message_chart_remedy_and_reason() -> None:
    one = finding(
        remedy="Lower the rate: `SGD(..., lr=0.1)`.\nOr clip.",
        evidence=(Evidence("loss", 12.5, healthy="below 2", meaning="largest loss"),),
        references=("A paper",),
        cause_of=(finding(rule="exploding_gradients"),),
    )
    elements = shown(one)
    for words in ("critical", "nan_inf", "It broke.", "steps 3 to 7", "12.5 largest loss", "healthy: below 2", "Fix:"):
        assert words in elements.text
    assert {"svg", "polyline", "rect"} <= set(elements.tags)
    assert "<code>SGD(..., lr=0.1)</code>.<br>Or clip." in one._repr_html_()
    assert "Also caused: exploding_gradients" in elements.text
    assert "See: A paper" in elements.text
    assert "Why" in elements.text


def test_finding_without_a_series_has_no_chart() -> None:
    assert "svg" not in shown(finding(chart=None)).tags


def test_finding_of_an_unknown_rule_is_shown() -> None:
    assert "of_a_plugin" in shown(finding(rule="of_a_plugin")).text


def test_hostile_finding_is_only_text() -> None:
    chart = Chart(HOSTILE, np.arange(5), np.ones(5))
    evidence = Evidence(HOSTILE, 1.0, healthy=HOSTILE, meaning=HOSTILE)
    one = finding(
        message=HOSTILE, remedy=HOSTILE, evidence=(evidence,), chart=chart, references=(HOSTILE,), sites=(HOSTILE,)
    )
    assert shown(one).text.count("<img src=x onerror=alert(1)>") == 7


def test_findings_show_causes_first_and_fold_their_consequences() -> None:
    symptom = finding(rule="exploding_gradients", severity=Severity.WARNING)
    text = shown(Findings([finding(cause_of=(symptom,)), symptom])).text
    assert "Findings: 1 critical, 1 warning" in text
    assert text.index("nan_inf") < text.index("Consequences: 1") < text.rindex("exploding_gradients")
    assert "No problems found" in shown(Findings()).text


def test_findings_of_a_run_have_the_series_that_shows_them(hostile_run: Path) -> None:
    found = sonde.open(hostile_run).findings()
    (broken,) = [one for one in found if one.rule == "nan_inf"]
    assert broken.chart is not None
    assert "svg" in shown(broken).tags
    assert "nan_inf" in shown(found).text


# --------------------------------------------------------------------------------------------------------------- tables


def test_table_shows_its_series_as_curves_and_its_ends(hostile_run: Path) -> None:
    elements = shown(sonde.open(hostile_run).stats("grad/*/norm"))
    assert "200 rows × 5 columns" in elements.text
    assert elements.tags.count("svg") == 5
    assert "grad/layers.1.weight/norm" in elements.text
    assert "…" in elements.text


def test_table_shows_logged_scalars_before_measured_ones() -> None:
    names = [*(f"data/input/{i}" for i in range(20)), "loss"]
    rows = [(step, name, float(step)) for name in names for step in range(4)]
    columns = dict(zip(("step", "name", "value"), zip(*rows, strict=True), strict=True))
    text = shown(Table(pa.table({key: list(values) for key, values in columns.items()}))).text
    assert text.index("loss") < text.index("data/input/0")
    assert "and 13 more series" in text


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"a": []},
        {"step": [], "value": []},
        {"step": [1, 2], "site": ["a", "b"], "value": [1.0, 2.0]},
        {"step": ["x", "y", "z"], "value": [1.0, 2.0, 3.0]},
        {"step": [None, 1, 2], "value": [1.0, None, float("nan")]},
        {"step": [1, 2, 3], "value": [float("nan")] * 3, "name": [None, None, None]},
        {f"c{i}": [1] for i in range(40)},
    ],
)
def test_any_table_can_be_shown(columns: dict[str, Any]) -> None:
    shown(Table(pa.table(columns)))


def test_hostile_table_is_only_text() -> None:
    table = Table(pa.table({"step": [1, 2, 3], HOSTILE: [HOSTILE] * 3, "value": [1.0, 2.0, 3.0]}))
    assert "<img src=x onerror=alert(1)>" in shown(table).text


def test_long_cells_are_cut() -> None:
    text = shown(Table(pa.table({"details": ["x" * 10_000]}))).text
    assert "x" * 100 in text
    assert "x" * 130 not in text
    assert "xxx…" in text


# ------------------------------------------------------------------------------------------------- runs and comparisons


def test_runs_show_status_loss_and_steps(begin: Any, tmp_path: Path) -> None:
    begin("first").steps(8, lambda step: 1 / (1 + step)).finish()
    begin(f"second{HOSTILE}", project=f"p{HOSTILE}").finish()
    found = sonde.runs(tmp_path / "runs")
    elements = shown(found)
    for words in ("2 runs", "gpt/first", "finished", "0.125", "<img src=x onerror=alert(1)>"):
        assert words in elements.text
    assert isinstance(found[:1], Runs)
    assert "No runs" in shown(found[:0]).text


def test_runs_in_a_terminal_are_a_short_list(begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    begin("first\x1b[2J").steps(8, lambda step: 1 / (1 + step)).finish()
    lines = repr(sonde.runs(tmp_path / "runs")).splitlines()
    assert lines[0] == "1 run"
    assert lines[1].split()[:5] == ["status", "run", "id", "steps", "loss"]
    assert re.search(r"finished .*8\s+0\.125", lines[2])
    assert "\x1b" not in lines[2]
    assert max(map(len, lines)) <= 80
    assert repr(Runs()) == "No runs"


def test_comparison_says_where_runs_differ(begin: Any) -> None:
    a = sonde.open(begin("a", config={"lr": 0.1, HOSTILE: HOSTILE}).steps(8, lambda step: 1.0).finish())
    b = sonde.open(begin(f"b{HOSTILE}", config={"lr": 0.2}).steps(8, lambda step: 2.0).finish())
    found = sonde.compare(a, b)
    elements = shown(found)
    for words in ("first differ at step 0", "Config values that differ: 2", "Scalars, last value", "loss"):
        assert words in elements.text
    assert repr(found).startswith("<gpt/a and gpt/b")
    assert "first difference at step 0" in repr(found)
    assert len(repr(found)) < 400


def test_comparison_of_weights_says_what_changed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", weight=np.ones(4), bias=np.zeros(4))
    np.savez(tmp_path / "b.npz", weight=np.ones(4) * 2, bias=np.zeros(4))
    text = shown(sonde.compare(tmp_path / "a.npz", tmp_path / "b.npz")).text
    assert "Of 2 tensors: 1 changed, 1 identical." in text
    assert "weight" in text
