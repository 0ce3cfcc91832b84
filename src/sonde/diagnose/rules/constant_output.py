"""The model gives the same output for every input. Always info: another fault is the cause."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.data import MIN_SEEN, seen
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import since
from sonde.schema.window import Window

SAME: Final = 1e-3


@rule(severity="info")
def constant_output(window: Window) -> Iterator[Found]:
    """The model's outputs do not depend on its inputs."""
    spread = seen(window, "data/output/batch_std")
    if len(spread) < MIN_SEEN or not seen(window, "data/input/size").typical > 1:
        return
    is_same = spread.values < SAME
    if not is_same[-3:].all():
        return
    step = onset(spread.steps, is_same)
    yield Found(
        f"The model has given the same output for every sample {since(step)}.",
        step=step,
        confidence=0.6,
        remedy="Find what cuts off the input: dead units, zero weights, a saturated layer or identical inputs.",
        evidence=(
            Evidence("data/output/batch_std", spread.late, "above 0.1", step, "variation of outputs in a batch"),
        ),
    )
