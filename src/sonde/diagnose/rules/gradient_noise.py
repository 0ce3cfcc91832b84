"""Gradient noise compared with the batch size: whether larger batches would help, or smaller ones would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

MIN_STEPS: Final = 50
UNLEARNED: Final = 0.6
"""Final loss as a fraction of its start below which the batch size is evidently good enough."""
FAR: Final = 10.0
"""Minimum factor between the noise scale and the batch size."""


@rule(
    severity="info",
    needs=("grad/*/sumsq", "optim/*.exp_avg/sumsq"),
    references=("McCandlish et al. 2018, An Empirical Model of Large-Batch Training",),
)
def gradient_noise(window: Window) -> Iterator[Found]:
    """The batch size is far from the gradient noise scale, above which larger batches bring little."""
    size = window.get("data/input/size")[1]
    noise = noise_scale(window, float(np.median(size))) if len(size) else None
    if noise is None:
        return
    batch = float(np.median(size))
    state = learned(window)
    if state is None or not state.left > UNLEARNED:
        return  # near its floor, the gradient of any model is mostly noise
    if noise > FAR * batch:
        what, remedy = (
            "far above",
            "Gradients are mostly noise. Try a batch several times larger, or accumulate gradients.",
        )
    elif noise < batch / FAR:
        what, remedy = "far below", "Batches are larger than necessary. Try smaller ones: they learn as much per step."
    else:
        return
    yield Found(
        f"The gradient noise scale (about {number(noise)} samples) is {what} the batch size ({batch:,.0f}).",
        step=0,
        confidence=0.5,
        evidence=[
            Evidence("grad/*/sumsq", noise, f"{batch / FAR:.0f} to {batch * FAR:.0f}", None, "noise scale in samples")
        ],
        remedy=remedy,
    )


def noise_scale(window: Window, batch: float) -> float | None:
    """The noise scale tr(Sigma) / |G|**2 in samples, from the squared norms of gradients g and Adam's first moments m.

    E|g|^2 = |G|^2 + tr and E|m|^2 = |G|^2 + tr (1-b)/(1+b), where tr = tr(Sigma) / batch: two equations, two unknowns.
    """
    grads = window.grid("grad/*/sumsq")
    moments = window.grid("optim/*.exp_avg/sumsq")
    if len(grads.steps) < MIN_STEPS or not len(moments) or len(moments.steps) != len(grads.steps):
        return None
    betas = structure(window).group_value("betas") or (0.9, 0.999)
    if not betas[0] > 0:
        return None  # m equals g: there is only one equation
    late = slice(len(grads.steps) // 3, None)
    g = float(nanmedian(np.nansum(grads.values[:, late], axis=0)))
    m = float(nanmedian(np.nansum(moments.values[:, late], axis=0)))
    shrink = (1.0 - betas[0]) / (1.0 + betas[0])
    noise = (g - m) / (1.0 - shrink)
    signal = g - noise
    if not noise > 0 or not signal > 0:
        return None
    return batch * noise / signal
