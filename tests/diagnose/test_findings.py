"""The list of findings: a list, with the series of each finding, that shows itself in words."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest

from sonde.diagnose.diagnosis import diagnose
from sonde.diagnose.finding import Evidence, Finding, Severity
from sonde.diagnose.findings import CHART_POINTS, Findings
from sonde.diagnose.rule import Found, Rule
from sonde.schema.window import Window


def finding(rule: str = "nan_inf", **fields: object) -> Finding:
    known = {"severity": Severity.CRITICAL, "confidence": 0.9, "step": 3, "last_step": 7, "message": "It broke."}
    return Finding(rule=rule, **{**known, **fields})  # type: ignore[arg-type]


def found(*evidence: Evidence, length: int = 5000) -> Findings:
    def broken(window: Window) -> Iterator[Found]:
        """A loss that breaks."""
        yield Found("It broke.", step=3, confidence=0.9, remedy="", evidence=evidence)

    values = np.ones(length)
    values[length // 2] = 99.0
    window = Window(scalars={"loss": (np.arange(length), values)})
    rule = Rule("broken", Severity.WARNING, (), (), (), broken)
    return Findings.of(diagnose(window, [rule]))


def test_it_is_a_list() -> None:
    one, two = finding(), finding("lr_too_high")
    assert Findings([one, two]) == [one, two]
    assert Findings([one, two])[1] is two
    assert Findings([one, two])[-1:] == [two]
    assert isinstance(Findings([one, two])[:1], Findings)
    assert pickle.loads(pickle.dumps(Findings([one]))) == [one]


def test_chart_is_the_series_of_the_evidence_with_its_spike() -> None:
    (one,) = found(Evidence("nothing", 1.0), Evidence("loss", 99.0))
    assert one.chart is not None
    assert one.chart.series == "loss"
    assert one.chart.values.max() == 99.0
    assert len(one.chart.values) <= 2 * CHART_POINTS


@pytest.mark.parametrize(
    ("evidence", "length"), [((), 10), ((Evidence("nothing", 1.0),), 10), ((Evidence("loss", 1.0),), 2)]
)
def test_without_a_series_there_is_no_chart(evidence: tuple[Evidence, ...], length: int) -> None:
    assert found(*evidence, length=length)[0].chart is None


def test_chart_is_not_part_of_a_finding() -> None:
    (with_chart,) = found(Evidence("loss", 1.0))
    (without,) = found(Evidence("loss", 1.0), length=2)
    assert with_chart.chart is not None
    assert "chart" not in with_chart.as_dict()
    assert len({with_chart, finding(), finding()}) == 2
    assert without.chart is None


def test_finding_says_what_when_and_how_to_fix_it() -> None:
    text = repr(finding(remedy="Lower it: `lr=1e-3`.\nOr clip."))
    assert text.splitlines() == [
        "✗ nan_inf  critical, confidence 90 %, steps 3 to 7",
        "  It broke.",
        "  fix: Lower it: `lr=1e-3`.",
        "       Or clip.",
    ]


def test_list_shows_causes_in_full_and_names_their_consequences() -> None:
    symptom = finding("exploding_gradients", severity=Severity.INFO)
    text = repr(Findings([finding(cause_of=(symptom,)), symptom]))
    assert text.startswith("2 findings\n✗ nan_inf")
    assert text.endswith("Consequences of these: exploding_gradients")
    assert repr(Findings()) == "No findings"


def test_long_list_and_long_lines_are_limited() -> None:
    text = repr(Findings([finding(f"rule_{i}", message="word " * 100) for i in range(30)]))
    assert text.endswith("and 10 more")
    assert max(map(len, text.splitlines())) <= 100


def test_message_cannot_move_the_cursor() -> None:
    text = repr(finding(message="\x1b[2J in \x1b[31mlayer", remedy="\x9b5A"))
    assert "\x1b" not in text
    assert "\x9b" not in text
