"""A layer so narrow that what the task needs does not pass, between layers that could carry it; not by width alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.depth import path
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Parameter
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

NARROW: Final = 8
"""How many times narrower than its neighbours."""
FULL: Final = 0.4
"""Share of its width a layer's effective rank uses; where it has room to spare, width is not what is missing."""
POOR: Final = 0.25
"""Share of the loss that is left."""


@rule(
    is_measured=True,
    severity="warning",
    causes=("underfitting", "rank_collapse"),
    references=("Tishby & Zaslavsky 2015", "Raghu et al. 2017"),
)
def bottleneck_layer(window: Window) -> Iterator[Found]:
    """A narrow layer is used to the full and the loss does not fall further."""
    loss = learned(window)
    classes = seen(window, "data/target/num_classes").highest
    if loss is None or not loss.left > POOR or loss.has_diverged or not classes >= 3:
        return
    if not seen(window, "data/target/is_class").typical > 0:
        return  # an autoencoder is narrow on purpose
    weights = path(window)
    for before, narrow, after in zip([None, *weights], weights, weights[1:], strict=False):
        width = narrow.shape[0]
        # Two numbers tell apart as many classes as one likes only if they are spread finely; one is never enough.
        if width * NARROW > min(narrow.shape[1], after.shape[0]) or width > max(1.0, (classes - 1) / 4):
            continue
        used = _rank(window, narrow)
        room = _rank(window, before) if before is not None else float("inf")
        if used >= FULL * width and room > 2 * used:
            yield _finding(window, narrow, after, used, room, loss.left)


def _rank(window: Window, weight: Parameter) -> float:
    """Effective rank of a layer's output over the later half of the run."""
    values = window.get(f"unit/{weight.owner}/rank")[1]
    late = values[len(values) // 2 :]
    late = late[np.isfinite(late)]
    return float(np.median(late)) if len(late) else float("nan")


def _finding(window: Window, narrow: Parameter, after: Parameter, used: float, room: float, left: float) -> Found:
    width = narrow.shape[0]
    units = "a single unit" if width == 1 else f"{width} units"
    return Found(
        f"everything has to pass {units} of {narrow.owner}, between {narrow.shape[1]} inputs and "
        f"{after.shape[0]} units after it; they are used to the full, and {left:.0%} of the loss is left",
        step=int(window.get(f"unit/{narrow.owner}/rank")[0][0]),
        confidence=0.75,
        sites=[narrow.owner],
        evidence=[
            Evidence(f"unit/{narrow.owner}/rank", used, f"near that of the layer before: {room:.1f}"),
            Evidence("loss", left, "below 0.1", meaning="share of the loss that is left"),
        ],
        remedy=f"{narrow.owner} = nn.{narrow.module_type}({narrow.shape[1]}, {after.shape[0]})  # now {width} wide",
    )
