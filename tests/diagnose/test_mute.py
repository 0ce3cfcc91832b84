"""Muted findings count nowhere, and are never lost."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import sonde
from sonde.cli.main import app
from sonde.config import Settings
from sonde.diagnose.diagnosis import diagnose
from sonde.diagnose.finding import Finding, Severity
from sonde.diagnose.mute import separate
from sonde.errors import SettingsError
from sonde.schema.mutes import Mute, parse_mutes
from sonde.schema.window import Window
from sonde.session.observers.rules import LiveRules

TODAY = date(2026, 5, 1)


def finding(rule: str = "dead_relu", *sites: str, cause_of: tuple[Finding, ...] = ()) -> Finding:
    return Finding(
        rule=rule, severity=Severity.CRITICAL, confidence=1.0, step=0, last_step=9, message="", sites=sites,
        cause_of=cause_of,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mute", "is_muted"),
    [
        ({"rule": "dead_relu"}, True),
        ({"rule": "dead_*"}, True),
        ({"rule": "nan_inf"}, False),
        ({"rule": "dead_relu", "sites": ["enc.*"]}, True),
        ({"rule": "dead_relu", "sites": ["enc.0"]}, False),
        ({"rule": "dead_relu", "sites": "enc.*"}, True),
        ({"rule": "dead_relu", "until": "2026-05-01"}, True),
        ({"rule": "dead_relu", "until": "2026-04-30"}, False),
        ("dead_relu:enc.*", True),
        ("nan_inf, dead_relu", True),
    ],
)
def test_a_mute_applies_by_rule_site_and_date(mute: Any, is_muted: bool) -> None:
    shown, muted = separate([finding("dead_relu", "enc.0", "enc.1")], parse_mutes(mute), TODAY)
    assert (len(shown), len(muted)) == ((0, 1) if is_muted else (1, 0))


def test_a_mute_by_site_leaves_a_finding_without_a_site() -> None:
    assert separate([finding()], parse_mutes("dead_relu:*"), TODAY)[1] == []


def test_a_consequence_of_a_muted_finding_is_shown_and_a_muted_consequence_is_not() -> None:
    symptom = finding("underfitting")
    root = finding("dead_relu", cause_of=(symptom,))
    assert [one.rule for one in separate([root, symptom], parse_mutes("dead_relu"), TODAY)[0]] == ["underfitting"]
    (shown,), _ = separate([root, symptom], parse_mutes("underfitting"), TODAY)
    assert shown.cause_of == ()


@pytest.mark.parametrize("wrong", [{"sites": "x"}, {"rule": "a", "site": "x"}, {"rule": "a", "until": "soon"}, 3, [3]])
def test_an_invalid_mute_is_refused(wrong: Any) -> None:
    with pytest.raises(SettingsError):
        Settings.load(mute=wrong)


def test_mutes_come_from_a_file_a_variable_and_a_keyword(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sonde.yaml").write_text("mute:\n  - rule: overfitting\n    until: 2030-01-01\n    reason: known\n")
    assert Settings.load().mute == (Mute(rule="overfitting", until="2030-01-01", reason="known"),)
    monkeypatch.setenv("SONDE_MUTE", "gradient_noise,dead_relu:layers.3.*")
    assert [mute.rule for mute in parse_mutes(Settings.load().mute)] == ["gradient_noise", "dead_relu"]
    monkeypatch.setenv("SONDE_MUTE", '[{"rule": "nan_inf"}]')
    assert [mute.rule for mute in parse_mutes(Settings.load().mute)] == ["nan_inf"]
    assert Settings.load(mute="loss_spikes").origin("mute") == "keyword"


CRASHED = {"status": "crashed", "reason": "ValueError: x"}


def crashed(**facts: Any) -> Window:
    return Window({}, {"loss": (np.arange(40), np.ones(40))}, {**CRASHED, **facts})


def test_a_muted_finding_is_not_critical_and_is_counted() -> None:
    found = diagnose(crashed(), mutes=parse_mutes("crashed"))
    assert [one.finding.rule for one in found.muted] == ["crashed"]
    assert not found.is_critical
    assert not found.is_blind


def test_the_mutes_of_a_run_apply_during_training() -> None:
    said: list[Any] = []
    for mutes in ([], [{"rule": "crashed"}]):
        rules = LiveRules(said.append, first_look_s=1e9)
        rules._import()
        rules._rolling.window = lambda facts, mutes=mutes: crashed(mute=mutes)  # type: ignore[union-attr,method-assign]
        outputs = list(rules.finish("crashed"))
        summary = outputs[-1].facts["diagnosis"]  # type: ignore[union-attr]
        assert (summary["critical"], summary["muted"]) == ((0, 1) if mutes else (1, 0))
    assert [one.finding.rule for one in said] == ["crashed"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sonde.Run:
    monkeypatch.chdir(tmp_path)
    session = sonde.init(project="mute", dir="runs", verbose=False, mute=["interrupted"])
    for step in range(30):
        session.log({"loss": 1.0 / (1 + step)})
        session.step()
    session.finish("crashed", "ValueError: x")
    return sonde.open("latest", dir="runs")


def test_the_command_counts_shows_and_forgives_muted_findings(run: sonde.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke = CliRunner().invoke
    assert run.manifest.facts["mute"][0]["rule"] == "interrupted"
    assert invoke(app, ["diagnose", str(run.path)]).exit_code == 1
    monkeypatch.setenv("SONDE_MUTE", "crashed")
    done = invoke(app, ["diagnose", str(run.path)])
    assert done.exit_code == 0
    assert "1 finding muted: crashed" in done.stdout.replace("\n", " ")
    assert "Training stopped" not in done.stdout
    assert "Training stopped" in invoke(app, ["diagnose", str(run.path), "--all"]).stdout
    assert '"muted": [' in invoke(app, ["diagnose", str(run.path), "--json"]).stdout
    assert run.findings() == []
