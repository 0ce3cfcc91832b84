"""Ranks that drift apart, and ranks that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sonde.diagnose.check import all_rules
from sonde.diagnose.finding import Finding
from sonde.schema.names import Series
from sonde.schema.window import Window


def findings(others: dict[int, list[float]], own: list[float]) -> list[Finding]:
    steps = np.array([1, 10, 100])
    events: list[dict[str, Any]] = [
        {"type": "fingerprint", "step": int(step), "details": {"rank": rank, "value": value}}
        for rank, values in others.items()
        for step, value in zip(steps, values, strict=True)
    ]
    window = Window({Series("model", "weights", "fingerprint"): (steps, np.array(own))}, facts={"events": events})
    return list(all_rules()["rank_desync"](window))


def test_the_rank_and_the_first_step_are_named() -> None:
    (finding,) = findings({1: [1.0, 2.0, 3.0], 2: [1.0, 2.5, 9.0]}, own=[1.0, 2.0, 3.0])
    assert finding.step == 10
    assert "weights of rank 2 have differed" in finding.message


@pytest.mark.parametrize("others", [{}, {1: [1.0, 2.0, 3.0]}, {1: [1.0, 2.0, float("nan")]}])
def test_ranks_with_the_same_weights_are_not_accused(others: dict[int, list[float]]) -> None:
    assert findings(others, own=[1.0, 2.0, float("nan")] if others.get(1, [0.0])[-1] != 3.0 else [1.0, 2.0, 3.0]) == []


def test_a_single_process_has_nothing_to_compare() -> None:
    assert list(all_rules()["rank_desync"](Window())) == []
