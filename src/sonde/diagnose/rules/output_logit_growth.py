"""Output logits grow far beyond what the loss needs: cross entropy does not penalise a common shift or scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import Levels, levels
from sonde.diagnose.measures.data import is_classification, seen
from sonde.diagnose.measures.loss import learned, validation
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

GROWTH: Final = 5.0
MODEST: Final = 30.0
"""Logits that start larger point to the scale of the inputs or weights, not to growth."""
FITTED: Final = 0.3
"""Final loss as a fraction of its start; below it, logits have to grow to fit the data further."""
BEYOND: Final = 4.0
"""log Z divided by the logarithm of the number of classes, while the data are not fitted; healthy up to 2."""
AT_LEAST: Final = 15.0
"""log Z below this is not drift, however few classes there are."""
LARGE: Final = 100.0
"""A logit this large is a fault if it hurts the held-out loss, or if a learned temperature causes it."""
HARMED: Final = 2.0
"""Held-out loss divided by its best value."""


@rule(
    severity="warning",
    causes=("loss_spikes",),
    references=(
        "Chowdhery et al. 2022, PaLM: z-loss 1e-4",
        "Wortsman et al. 2023, small-scale proxies",
        "Radford et al. 2021, CLIP: the temperature is clamped at 100",
    ),
)
def output_logit_growth(window: Window) -> Iterator[Found]:
    """Output logits grow more than the task needs."""
    logit, normaliser = levels(window, "data/output/logit_max"), levels(window, "data/output/log_z")
    if logit is None or not is_classification(window) or not (logit.growth > GROWTH and logit.start < MODEST):
        return
    if not _is_beyond_need(window, normaliser) and not (
        logit.end > LARGE and (_does_harm(window) or _has_temperature(window))
    ):
        return
    evidence = [Evidence("data/output/logit_max", logit.end, "5 to 30", logit.since, "largest output")]
    if normaliser is not None:
        evidence.append(
            Evidence("data/output/log_z", normaliser.end, "below 20", meaning="mean |log Z| of the softmax")
        )
    yield Found(
        f"The output logits have grown from {number(logit.start)} to {number(logit.end, 3)}, "
        f"mostly by step {logit.since:,}.",
        step=logit.since,
        confidence=0.7,
        evidence=evidence,
        remedy="Add a z-loss: `loss = loss + 1e-4 * torch.logsumexp(logits, -1).square().mean()`. Clamp a learned "
        "temperature: `log_scale.clamp(max=4.6)`. Use the same learning rate for the output layer as for the others.",
    )


def _is_beyond_need(window: Window, normaliser: Levels | None) -> bool:
    """Whether log Z is far above what the number of classes requires, although the data are not fitted."""
    state, width = learned(window), seen(window, "data/output/width").typical
    # A run that ended in NaN has a more severe fault than this one.
    if state is None or normaliser is None or not width > 1 or state.has_diverged:
        return False
    is_fitted = 0 <= state.left < FITTED
    return not is_fitted and normaliser.end > max(AT_LEAST, BEYOND * math.log(width))


def _does_harm(window: Window) -> bool:
    """Whether the held-out loss has risen again since its best value."""
    values = validation(window)[1]
    values = values[np.isfinite(values)]
    if len(values) < 3:
        return False
    end = float(np.median(values[-2:]))
    return end > HARMED * float(values.min()) and end > FITTED * float(values[0])


def _has_temperature(window: Window) -> bool:
    """Whether the model learns a single number, like CLIP's temperature, which only a clamp can bound."""
    return any(p.trainable and math.prod(p.shape) == 1 for p in structure(window).parameters)
