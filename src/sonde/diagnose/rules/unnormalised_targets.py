"""Targets of a regression so large that the outputs never get there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_regression, seen
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

FAR: Final = 30.0
"""Targets this many times as large as what the model first puts out are out of its reach for long."""


@rule(
    causes=(
        "lr_too_low", "underfitting", "exploding_gradients", "lr_too_high", "nan_inf", "loss_spikes", "dead_relu",
        "saturated_activations", "vanishing_gradients", "loss_oscillation", "rank_collapse", "output_logit_growth",
        "init_scale", "missing_warmup", "constant_output", "bottleneck_layer", "clip_too_tight",
    ),
    references=("LeCun et al. 1998, Efficient BackProp", "Wardat et al. 2021, DeepLocalize (SO-52800582)"),
)  # fmt: skip
def unnormalised_targets(window: Window) -> Iterator[Found]:
    """Targets are far larger than what a freshly initialised model puts out."""
    std, mean = seen(window, "data/target/std"), seen(window, "data/target/mean")
    if len(std) < 3 or not is_regression(window):
        return
    size = float(np.hypot(std.typical, mean.typical))
    outputs = seen(window, "data/output/logit_max")
    first = max(float(outputs.values[0]) if len(outputs) else 1.0, 1.0)
    state = learned(window)
    if not size > FAR * first or state is None:
        return
    # Large targets that are learned all the same are a matter of taste.
    is_learned = not state.has_diverged and state.left < 0.5 and len(std) >= MIN_SEEN
    yield Found(
        f"targets are about {size:.3g} in size, {size / first:.0f} times what the model puts out at first",
        step=int(std.steps[0]),
        confidence=0.85,
        remedy="y = (y - train_y.mean()) / train_y.std()  # and undo it when predicting",
        evidence=(
            Evidence("data/target/std", std.typical, "about 1"),
            Evidence("data/target/mean", mean.typical, "about 0"),
            Evidence("data/output/logit_max", first, f"about {size:.3g}", meaning="largest of the first outputs"),
        ),
        severity="info" if is_learned else None,
    )
