"""A layer is too narrow for the information that the task needs. Judged by the rank in use, not by width alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.depth import path
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import Parameter
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, number
from sonde.schema.window import Window

NARROW: Final = 8
"""How many times narrower than its neighbours the layer must be."""
FULL: Final = 0.4
"""Effective rank as a fraction of the width; with rank to spare, width is not what is missing."""
POOR: Final = 0.25
"""Final loss as a fraction of its start."""


@rule(
    is_measured=True,
    severity="warning",
    causes=("underfitting", "rank_collapse"),
    references=("Tishby & Zaslavsky 2015", "Raghu et al. 2017"),
)
def bottleneck_layer(window: Window) -> Iterator[Found]:
    """A narrow layer is used to its full rank, and the loss does not fall further."""
    loss = learned(window)
    classes = seen(window, "data/target/num_classes").highest
    if loss is None or not loss.left > POOR or loss.has_diverged or not classes >= 3:
        return
    if not seen(window, "data/target/is_class").typical > 0:
        return  # an autoencoder is narrow on purpose
    weights = path(window)
    for before, narrow, after in zip([None, *weights], weights, weights[1:], strict=False):
        width = narrow.shape[0]
        # Two numbers can separate any number of classes only if spread finely; one is never enough.
        if width * NARROW > min(narrow.shape[1], after.shape[0]) or width > max(1.0, (classes - 1) / 4):
            continue
        used = _rank(window, narrow)
        room = _rank(window, before) if before is not None else float("inf")
        if used >= FULL * width and room > 2 * used:
            yield _finding(window, narrow, after, used, room, loss)


def _rank(window: Window, weight: Parameter) -> float:
    """Effective rank of a layer's output over the second half of the run."""
    values = window.get(f"unit/{weight.owner}/rank")[1]
    late = values[len(values) // 2 :]
    late = late[np.isfinite(late)]
    return float(np.median(late)) if len(late) else float("nan")


def _finding(window: Window, narrow: Parameter, after: Parameter, used: float, room: float, loss: Learned) -> Found:
    width = narrow.shape[0]
    units = "a single unit" if width == 1 else f"{width} units"
    healthy = f"near the previous layer's ({number(room)})" if np.isfinite(room) else "higher"
    return Found(
        f"All information has to pass through {units} of {narrow.owner}, between {narrow.shape[1]:,} inputs and "
        f"{after.shape[0]:,} units after it: its full rank is in use, and {loss.outcome}.",
        step=int(window.get(f"unit/{narrow.owner}/rank")[0][0]),
        confidence=0.75,
        sites=[narrow.owner],
        evidence=[
            Evidence(f"unit/{narrow.owner}/rank", used, healthy, None, "effective rank"),
            Evidence("loss", loss.left, "below 0.1", meaning=f"final loss relative to {loss.reference}"),
        ],
        remedy=f"Widen {narrow.owner} (now {counted(width, 'unit')}): "
        f"`{narrow.owner} = nn.{narrow.module_type}({narrow.shape[1]}, {after.shape[0]})`.",
    )
