"""The loss is summed over the batch, so gradients and steps grow with the batch size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.rate import one_digit
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

SCALE_FREE: Final = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion", "Adafactor")
MIN_TERMS: Final = 8


@rule(
    causes=(
        "lr_too_high", "exploding_gradients", "loss_oscillation", "loss_spikes", "dead_relu", "nan_inf", "underfitting",
        "vanishing_gradients", "output_logit_growth", "clip_too_tight", "saturated_activations", "constant_output",
        "rank_collapse", "init_scale", "missing_warmup",
    ),
    references=("Ben Braiek and Khomh 2022, TheDeepChecker",),
)  # fmt: skip
def loss_reduction_sum(window: Window) -> Iterator[Found]:
    """The loss is a sum over the batch, so the learning rate is multiplied by the number of samples."""
    reduction, terms = seen(window, "data/loss/reduction"), seen(window, "data/loss/numel")
    if len(reduction) < 3 or reduction.typical != 1 or not terms.typical >= MIN_TERMS:
        return
    state = learned(window)
    if state is None or not _is_logged_as_summed(window, state):
        return
    optimizer = structure(window).optimizer_type
    is_harmed = _is_harmed(window, state, terms.typical)
    # Optimizers that divide by the gradient's magnitude are not affected.
    severity = "warning" if is_harmed and optimizer not in SCALE_FREE else "info"
    rate = structure(window).group_value("lr")
    num_terms = int(terms.typical)
    remedy = 'Use `reduction="mean"`'
    if isinstance(rate, float | int):
        lower = f"`lr={one_digit(rate / terms.typical)}` (now {number(rate, 3)})"
        remedy += f", or divide the learning rate by {num_terms:,}: {lower}"
    yield Found(
        f"The loss is the sum over {num_terms:,} terms, not their mean: gradients, and the steps of plain SGD, are "
        f"{num_terms:,} times as large.",
        step=int(reduction.steps[0]),
        confidence=0.95,
        remedy=f"{remedy}.",
        evidence=(
            Evidence("data/loss/reduction", 1, "0 (mean)", meaning="reduction of the loss: 1 is a sum"),
            Evidence(
                state.name, state.first, f"{number(state.first / terms.typical, 3)} per sample", meaning="first loss"
            ),
        ),
        severity=severity,
    )


def _is_logged_as_summed(window: Window, state: Learned) -> bool:
    """Whether the sum itself was logged, and so most likely trained on, and was not divided later."""
    steps, values = window.get("data/loss/value")
    _, mine, theirs = np.intersect1d(state.steps, steps, return_indices=True)
    a, b = state.values[mine], values[theirs]
    usable = np.isfinite(a) & np.isfinite(b) & (b != 0)
    return bool(usable.any()) and abs(float(np.median(a[usable] / b[usable])) - 1) < 0.05


def _is_harmed(window: Window, state: Learned, num_terms: float) -> bool:
    """Whether the large steps did damage: the loss diverged, jumped or did not fall."""
    if state.has_diverged or not np.isfinite(state.values).all():
        return True
    baseline = seen(window, "data/loss/baseline")
    guessing = baseline.values[-1] * num_terms if len(baseline) else state.first
    unit = min(state.first, guessing)
    return state.end > 0.5 * unit or state.peak > 3 * max(state.first, guessing)
