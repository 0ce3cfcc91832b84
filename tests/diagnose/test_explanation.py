"""An explanation names the number that rejected each alternative, and changes no rule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sonde
from sonde.cli.main import app
from sonde.diagnose.check import all_rules
from sonde.diagnose.confidence import Table, confidences, reliability
from sonde.diagnose.decisions import _compiled, decisions
from sonde.diagnose.diagnosis import diagnose
from sonde.diagnose.explanation import explain
from sonde.errors import UnknownNameError, UsageError
from sonde.schema.window import Window

STEPS = np.arange(200)


def flat(**scalars: float) -> Window:
    """A loss that falls by little and then stays."""
    loss = 2.3 - 0.2 * np.minimum(STEPS / 40, 1.0)
    return Window({}, {"loss": (STEPS, loss)} | {name: (STEPS, np.full(200, value)) for name, value in scalars.items()})


def test_every_rule_can_be_followed_and_finds_the_same() -> None:
    window = flat()
    for one in all_rules().values():
        function, _ = _compiled(one)
        assert [found.message for found in function(window)] == [found.message for found in one.function(window)]


def test_the_deciding_number_and_threshold_are_named() -> None:
    window = Window({}, {"loss": (STEPS, np.exp(-STEPS / 40))})
    last = decisions(all_rules()["loss_plateau"], window)[-1]
    assert (last.what, last.threshold, last.limit, last.relation) == ("loss.left", "UNLEARNED", 0.7, "at most")
    assert last.value < 0.1
    assert not last.is_true


def test_alternatives_are_rejected_found_explained_or_unknown() -> None:
    found = diagnose(flat())
    (plateau,) = [one for one in found.findings if one.rule == "loss_plateau"]
    explanation = explain(found, plateau)
    outcomes = {one.rule: one.outcome for one in explanation.alternatives}
    assert outcomes["clip_too_tight"] == "unknown"  # no gradients
    assert outcomes["lr_too_high"] in ("unknown", "rejected")
    assert all(one.is_cause for one in explanation.alternatives if "loss_plateau" in all_rules()[one.rule].causes)
    assert "sonde.watch(model, optimizer)" in explanation.to_record
    json.dumps(explanation.as_dict())
    assert "considered and rejected" in repr(explanation) or "could not be checked" in repr(explanation)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sonde.Run:
    monkeypatch.chdir(tmp_path)
    session = sonde.init(project="why", dir="runs", verbose=False)
    for step in range(100):
        session.log({"loss": 2.3 - 0.2 * min(step / 20, 1.0)})
        session.step()
    session.finish("crashed", "ValueError: x")
    return sonde.open("latest", dir="runs")


def test_python_and_the_command_explain_the_same(run: sonde.Run) -> None:
    by_number, by_rule, by_finding = run.explain(1), run.explain("crashed"), run.explain(run.findings()[0])
    assert by_number.finding.rule == by_rule.finding.rule == by_finding.finding.rule == "crashed"
    done = CliRunner().invoke(app, ["explain", str(run.path), "loss_plateau", "--json"])
    told = json.loads(done.stdout)
    assert told == json.loads(json.dumps(run.explain("loss_plateau").as_dict()))
    assert told["chart"]["series"] == "loss"
    shown = CliRunner().invoke(app, ["explain", str(run.path)]).stdout
    assert "crashed" in shown
    assert "sonde explain crashed" in shown
    assert "crashed" in run.explain(1)._repr_html_()


def test_a_finding_that_is_not_there_is_refused(run: sonde.Run) -> None:
    with pytest.raises(UnknownNameError, match="crashed"):
        run.explain("crasher")
    with pytest.raises(UsageError, match="no finding 99"):
        run.explain(99)


def test_a_rule_is_explained_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["explain", "dead_relu"])
    assert done.exit_code == 0
    assert "## Why it happens" in done.stdout
    told = json.loads(CliRunner().invoke(app, ["explain", "dead_relu", "--json"]).stdout)
    assert told["thresholds"][0] == {
        "name": "DEAD",
        "value": "0.5",
        "meaning": "Fraction of a layer's units. The 95th percentile of healthy runs is 0.48.",
    }


def test_a_misspelt_rule_is_named_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(CliRunner().invoke(app, ["explain", "dead_rel"]).exception) == (
        'no rule or run "dead_rel". Did you mean "dead_relu"?'
    )
    assert "no run" in str(CliRunner().invoke(app, ["explain", "qqq"]).exception)


# ------------------------------------------------------------------------------------------------ calibrated confidence


def test_the_table_sets_the_confidence_of_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [("loss_plateau", 0.4, number < 18) for number in range(20)]
    table = reliability(counted, "20 programs")
    monkeypatch.setattr("sonde.diagnose.rule.confidences", lambda: table)
    (found,) = all_rules()["loss_plateau"](flat())
    assert found.confidence == pytest.approx((18 + 4 * 0.4) / 24)


def test_a_rule_without_rows_keeps_its_confidence_and_few_findings_move_it_little() -> None:
    assert Table().calibrated("nan_inf", 0.9) == 0.9
    one = reliability([("nan_inf", 0.9, False)], "1 program")
    assert 0.7 < one.calibrated("nan_inf", 0.9) < 0.9


def test_the_table_survives_its_file() -> None:
    from sonde.diagnose.confidence import Row

    table = reliability([("a", 0.5, True), ("a", 0.9, False), ("b", 0.3, True)], "3 programs")
    read = json.loads(table.as_json())
    assert {name: tuple(Row(*row) for row in rows) for name, rows in read["rules"].items()} == dict(table.rows)
    assert set(confidences().rows) <= set(all_rules())
