"""`sonde diagnose`: roots before symptoms, exit codes, silence that says what it missed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sonde.diagnose.check import all_rules
from sonde.diagnose.finding import Evidence, Finding
from sonde.diagnose.rule import RULES, Found, Rule, Severity
from sonde.schema.window import Window

HOSTILE = "0.weight\x1b[31m\u202e"


def plant(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    severity: str = "warning",
    *,
    causes: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    step: int = 5,
    confidence: float = 0.9,
    fails: bool = False,
) -> None:
    """A rule that always finds the same."""

    def function(window: Window) -> Iterator[Found]:
        if fails:
            raise ValueError("planted failure")
        steps, norms = window.get("grad/0.weight/norm")
        norm = float(norms[steps == step][0]) if step in steps else 0.25
        yield Found(
            f"{name} of {HOSTILE} since step {step}",
            step=step,
            confidence=confidence,
            sites=("0.weight",),
            evidence=(Evidence("grad/0.weight/norm", norm, "1 to 10", step, "norm of the gradient"),),
            remedy="optimizer = SGD(model.parameters(), lr=0.01)\nscheduler = LinearLR(optimizer)",
        )

    monkeypatch.setitem(
        RULES,
        name,
        Rule(
            name=name,
            severity=Severity(severity),
            needs=needs,
            causes=causes,
            references=("Planted 2026",),
            function=function,
        ),
    )


@pytest.fixture(autouse=True)
def no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rules that a test plants."""
    for name in list(all_rules()):
        monkeypatch.delitem(RULES, name)


@pytest.fixture
def ill(monkeypatch: pytest.MonkeyPatch, make_run: Any) -> Any:
    plant(monkeypatch, "symptom", step=9)
    plant(monkeypatch, "root", "critical", causes=("symptom",))
    plant(monkeypatch, "remark", "info", step=0)
    return make_run()


def test_root_comes_first_with_its_symptoms_folded_under_it(sonde: Any, ill: Any) -> None:
    lines = sonde("diagnose", code=1).stdout.splitlines()
    starts = [line.split()[1] for line in lines if line.startswith(("✗", "!", "·"))]
    assert starts == ["root"]
    (folded,) = [line for line in lines if line.strip().startswith("also caused")]
    assert "symptom" in folded
    assert any("1 remark not shown; add --all" in line for line in lines)


def test_a_note_has_numbers_healthy_range_picture_remedy_certainty_and_source(sonde: Any, ill: Any) -> None:
    text = sonde("diagnose", code=1).stdout
    for needed in (
        "critical, confidence 90 %, steps 5 to 19",
        "0.527        norm of the gradient at step 5   healthy: 1 to 10",
        "█",
        "grad/0.weight/norm, steps 0 to 19",
        "fix          optimizer = SGD(model.parameters(), lr=0.01)",
        "             scheduler = LinearLR(optimizer)",
        "reference    Planted 2026",
        "health",
    ):
        assert needed in text


def test_all_unfolds_symptoms_and_remarks(sonde: Any, ill: Any) -> None:
    text = sonde("diagnose", "--all", code=1).stdout
    assert text.count("fix          optimizer") == 3
    assert "· remark" in text


def test_json_holds_everything(sonde: Any, ill: Any) -> None:
    answer = sonde("diagnose", "--json", code=1).json
    assert [f["rule"] for f in answer["findings"]] == ["root", "remark", "symptom"]
    assert answer["findings"][0]["cause_of"][0]["rule"] == "symptom"
    assert answer["counts"] == {"critical": 1, "warning": 0, "info": 2}
    assert 0 <= answer["health"] < 40
    assert {gap["what"] for gap in answer["not_recorded"]} >= {"a validation loss", "updates"}


def test_a_symptom_that_stays_a_warning_is_folded_all_the_same(
    sonde: Any, ill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "symptom", replace(RULES["symptom"], is_measured=True))
    answer = sonde("diagnose", "--json", code=1).json
    assert answer["counts"]["warning"] == 1
    lines = sonde("diagnose", code=1).stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith(("✗", "!"))] == ["root"]


def test_only_a_critical_finding_makes_the_exit_code_one(
    sonde: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run()
    plant(monkeypatch, "root", "warning")
    sonde("diagnose", code=0)
    sonde("diagnose", "--json", code=0)


def test_a_healthy_run_is_one_line_that_says_what_was_checked_and_what_was_not(
    sonde: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(window: Window) -> Iterator[Finding]:
        yield from ()

    for name, needs in (("seeing", ("grad/*/norm",)), ("blind", ("optim/*/rms",))):
        monkeypatch.setitem(
            RULES,
            name,
            Rule(name=name, severity=Severity("warning"), needs=needs, causes=(), references=(), function=silent),
        )
    make_run()
    monkeypatch.setenv("COLUMNS", "400")
    text = sonde("diagnose").stdout
    assert text.count("\n") == 1
    assert "no problems found (health 100 of 100). 1 rule checked 20 recorded steps." in text
    assert "Not checked: overfitting (no validation loss recorded)" in text


def test_a_run_without_numbers_is_not_called_healthy(sonde: Any, make_run: Any) -> None:
    make_run(steps=0, sites=())
    text = sonde("diagnose").stdout
    assert "nothing was recorded that the rules could check" in text


def test_a_rule_that_fails_is_named_and_the_others_run(sonde: Any, ill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "broken", fails=True)
    answer = sonde("diagnose", "--json", code=1).json
    assert answer["failed_rules"] == ["broken"]
    assert answer["findings"][0]["rule"] == "root"
    assert "the rule broken failed and was skipped: ValueError('planted failure')" in answer["warnings"]
    assert "broken" in sonde("diagnose", code=1).stdout


def test_names_cannot_steer_the_terminal(sonde: Any, ill: Any) -> None:
    for arguments in (("diagnose",), ("diagnose", "--all"), ("diagnose", "--table")):
        text = sonde(*arguments, code=1).stdout
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b[31m" in text


@pytest.mark.parametrize("width", ["20", "40", "80"])
def test_narrow_terminals_are_kept_to(sonde: Any, ill: Any, monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for arguments in (("diagnose",), ("diagnose", "--all")):
        lines = sonde(*arguments, code=1).stdout.splitlines()
        assert max(map(len, lines)) <= int(width)


def test_a_table_is_flat_in_order_of_time_and_names_causes(sonde: Any, ill: Any) -> None:
    rows = sonde("diagnose", "--table", "--json", code=1).json
    assert [(row["step"], row["type"], row["caused_by"]) for row in rows] == [
        (0, "remark", None),
        (5, "root", None),
        (9, "symptom", "root"),
    ]
    assert "5-19" in sonde("diagnose", "--table", code=1).stdout


def test_findings_are_filtered_by_type_and_severity(sonde: Any, ill: Any) -> None:
    def types(*filters: str, code: int) -> list[str]:
        return [row["type"] for row in sonde("diagnose", "--table", "--json", *filters, code=code).json]

    assert types("--severity", "warning", code=1) == ["root"]
    assert types("--type", "r*", code=1) == ["remark", "root"]
    assert types("--type", "z*", code=0) == []
    assert "No findings match these filters" in sonde("diagnose", "--table", "--type", "z*").stderr
    assert "No findings match these filters" in sonde("diagnose", "--type", "z*").stderr


def test_a_symptom_or_a_remark_asked_for_by_its_type_is_shown(sonde: Any, ill: Any) -> None:
    for name in ("symptom", "remark"):
        text = sonde("diagnose", "--type", name).stdout
        assert f"{name} of" in text
        assert "root of" not in text


def test_the_exit_code_can_be_zero(sonde: Any, ill: Any) -> None:
    sonde("diagnose", "--exit-zero", code=0)
    sonde("diagnose", "--json", "--table", "--exit-zero", code=0)


@pytest.mark.parametrize("option", [("--type", "rooot"), ("--severity", "criticl")])
def test_a_misspelt_filter_names_the_nearest(sonde: Any, ill: Any, option: tuple[str, str]) -> None:
    answer = sonde("diagnose", *option, code=2)
    assert "Did you mean" in answer.stderr


def test_show_and_list_say_what_was_found_while_it_trained(sonde: Any, make_run: Any) -> None:
    make_run(facts={"diagnosis": {"critical": 1, "warning": 2, "info": 0, "health": 41.2}})
    assert "1 critical, 2 warnings, health 41 of 100" in sonde("show").stdout
    assert "1 critical" in sonde("list").stdout
    (row,) = sonde("list", "--json").json
    assert (row["findings"]["warning"], row["health"]) == (2, 41.2)


@pytest.mark.parametrize("stored", [None, "x", {"critical": "many", "health": "good"}])
def test_show_and_list_survive_a_run_without_a_diagnosis(sonde: Any, make_run: Any, stored: Any) -> None:
    make_run(facts={"diagnosis": stored})
    sonde("show")
    (row,) = sonde("list", "--json").json
    assert row["findings"] is None
    assert row["health"] is None
