"""How noisy gradients are beside the batch size: whether larger batches would pay, or smaller ones would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

MIN_STEPS: Final = 50
FAR: Final = 10.0
"""The noise scale must differ from the batch size by this much to be worth a remark."""


@rule(
    severity="info",
    needs=("grad/*/sumsq", "optim/*.exp_avg/sumsq"),
    references=("McCandlish et al. 2018, An Empirical Model of Large-Batch Training",),
)
def gradient_noise(window: Window) -> Iterator[Found]:
    """The batch size is far from the gradient noise scale, at which batches begin to pay less than they cost."""
    size = window.get("data/input/size")[1]
    noise = noise_scale(window, float(np.median(size))) if len(size) else None
    if noise is None:
        return
    batch = float(np.median(size))
    if noise > FAR * batch:
        what, remedy = (
            "far above",
            "gradients are mostly noise: batches several times as large, or gradients accumulated",
        )
    elif noise < batch / FAR:
        what, remedy = "far below", "batches are larger than they need be: smaller ones would learn as much per step"
    else:
        return
    yield Found(
        f"the gradient noise scale of about {float(f'{noise:.2g}'):,g} samples is {what} the batch size of {batch:.0f}",
        step=0,
        confidence=0.5,
        evidence=[Evidence("grad/*/sumsq", noise, f"{batch / FAR:.0f} to {batch * FAR:.0f}", None, "noise scale")],
        remedy=f"{remedy}.",
    )


def noise_scale(window: Window, batch: float) -> float | None:
    """tr(Sigma) / |G|**2 in samples, from the squared norms of gradients g and of Adam's first moments m.

    E|g|^2 = |G|^2 + tr and E|m|^2 = |G|^2 + tr (1-b)/(1+b), where tr = tr(Sigma) / batch: two equations, two unknowns.
    """
    grads = window.grid("grad/*/sumsq")
    moments = window.grid("optim/*.exp_avg/sumsq")
    if len(grads.steps) < MIN_STEPS or not len(moments) or len(moments.steps) != len(grads.steps):
        return None
    betas = structure(window).group_value("betas") or (0.9, 0.999)
    if not betas[0] > 0:
        return None  # then m is g: one equation
    late = slice(len(grads.steps) // 3, None)
    g = float(nanmedian(np.nansum(grads.values[:, late], axis=0)))
    m = float(nanmedian(np.nansum(moments.values[:, late], axis=0)))
    shrink = (1.0 - betas[0]) / (1.0 + betas[0])
    noise = (g - m) / (1.0 - shrink)
    signal = g - noise
    if not noise > 0 or not signal > 0:
        return None
    return batch * noise / signal
