"""Regression targets are so large that the outputs never reach them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_regression, seen
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

FAR: Final = 30.0
"""Targets that exceed the first outputs by this factor are out of reach for a long time."""
LEARNED: Final = 0.3
"""Final loss as a fraction of its start, or of a constant prediction's, below which they were reached."""


@rule(
    causes=(
        "lr_too_low", "underfitting", "exploding_gradients", "lr_too_high", "nan_inf", "loss_spikes", "dead_relu",
        "saturated_activations", "vanishing_gradients", "loss_oscillation", "rank_collapse", "output_logit_growth",
        "init_scale", "missing_warmup", "constant_output", "bottleneck_layer", "clip_too_tight",
    ),
    references=("LeCun et al. 1998, Efficient BackProp", "Wardat et al. 2021, DeepLocalize (SO-52800582)"),
)  # fmt: skip
def unnormalised_targets(window: Window) -> Iterator[Found]:
    """The targets are far larger than the outputs of a freshly initialised model."""
    std, mean = seen(window, "data/target/std"), seen(window, "data/target/mean")
    if len(std) < 3 or not is_regression(window):
        return
    size = float(np.hypot(std.typical, mean.typical))
    outputs = seen(window, "data/output/logit_max")
    first = max(float(outputs.values[0]) if len(outputs) else 1.0, 1.0)
    state = learned(window)
    if not size > FAR * first or state is None:
        return
    # Large targets that are learned anyway are only info.
    is_learned = not state.has_diverged and state.left < LEARNED and len(std) >= MIN_SEEN
    yield Found(
        f"The targets have a root mean square of {number(size, 3)}, {number(size / first)} times the largest of the "
        "model's first outputs.",
        step=int(std.steps[0]),
        confidence=0.85,
        remedy="Normalise them: `y = (y - train_y.mean()) / train_y.std()`, and undo it when predicting.",
        evidence=(
            Evidence("data/target/std", std.typical, "about 1", meaning="standard deviation of the targets"),
            Evidence("data/target/mean", mean.typical, "about 0", meaning="mean of the targets"),
            Evidence(
                "data/output/logit_max", first, f"about {number(size, 3)}", meaning="largest of the first outputs"
            ),
        ),
        severity="info" if is_learned else None,
    )
