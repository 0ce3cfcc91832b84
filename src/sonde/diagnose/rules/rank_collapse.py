"""Hidden layers give nearly the same output for every input, although inputs differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import Lasting, onset
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent, since
from sonde.schema.window import Window

SAME: Final = 0.01
"""Standard deviation over the batch, relative to the output; 0.3 to 1 in healthy layers."""
STUCK: Final = 0.85


@rule(
    severity="warning",
    causes=("underfitting", "bottleneck_layer", "lr_too_low"),
    references=("Dong et al. 2021, Attention is not all you need", "Noci et al. 2022", "Schoenholz et al. 2017"),
)
def rank_collapse(window: Window) -> Iterator[Found]:
    """The outputs of a hidden layer no longer depend on the input."""
    loss = learned(window)
    if loss is None or not loss.left > STUCK or loss.has_diverged:
        return
    if seen(window, "data/input/is_token").typical == 0.0 and not seen(window, "data/input/sample_std").typical > 0.1:
        return
    collapsed = _collapsed(window)
    if not collapsed:
        return
    first = collapsed[0]
    # A collapse later in the run has another cause (dead units, decayed weights), so it is only info.
    is_by_design = first.since <= window.get(f"unit/{first.site}/batch_std")[0][0] + 2
    yield Found(
        f"From {first.site} on, outputs have been nearly the same for every input {since(first.since)}: "
        f"they differ by only {percent(first.level)} of their size.",
        step=first.since,
        confidence=0.6,
        sites=[layer.site for layer in collapsed],
        evidence=[
            Evidence(
                f"unit/{first.site}/batch_std", first.level, "0.3 to 1", first.since, "variation of outputs in a batch"
            )
        ],
        remedy="Add skip connections and norm layers to the blocks, and initialise so that signals keep their size.",
        severity=None if is_by_design else "info",
    )


def _collapsed(window: Window) -> list[Lasting]:
    """Layers from the first collapsed one, if no later layer distinguishes inputs again."""
    found: list[Lasting] = []
    for module in structure(window).in_order:
        if module.kind not in ("linear", "conv", "norm"):
            continue
        steps, values = window.get(f"unit/{module.name}/batch_std")
        if len(values) < 8:
            continue
        late = values[len(values) // 2 :]
        if np.isfinite(late).all() and np.median(late) < SAME and values[-1] < SAME:
            found.append(Lasting(module.name, float(np.median(late)), onset(steps, values < SAME), float(values[-1])))
        else:
            found.clear()
    return found
