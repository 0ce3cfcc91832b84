"""Evidence never contradicts its series, whatever a rule claims."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.finding import Evidence
from sonde.diagnose.grounding import grounded
from sonde.schema.window import Window

WINDOW = Window(scalars={"loss": (np.arange(10, 60, 10), np.array([8.0, 4.0, 2.0, 1.0, np.nan]))})


@pytest.mark.parametrize(
    ("claimed", "step", "shown"),
    [
        ((4.0, 20), 20, 4.0),
        ((4.0, 30), 20, 4.0),  # another step
        ((1.98, None), 30, 2.0),  # a level near a recorded value
        ((0.125, 40), None, 0.125),  # a ratio, which is not in the chart
        ((float("nan"), 50), 50, float("nan")),
        ((float("inf"), 50), None, float("inf")),
    ],
)
def test_a_number_has_a_step_only_where_it_was_recorded(
    claimed: tuple[float, int | None], step: int | None, shown: float
) -> None:
    one = grounded(Evidence("loss", claimed[0], "", claimed[1]), WINDOW)
    assert one.step == step
    assert one.value == pytest.approx(shown, nan_ok=True)


def test_a_range_that_contains_the_number_is_not_shown() -> None:
    assert grounded(Evidence("loss", 4.0, "below 5", 20), WINDOW).healthy == ""
    assert grounded(Evidence("loss", 4.0, "below 2", 20), WINDOW).healthy == "below 2"
    assert grounded(Evidence("loss", 4.0, "7e-4 to 2e-2", 20), WINDOW).healthy == "7e-4 to 2e-2"
