"""The influence of each weight matrix on the loss, from the input to the output. Contains no rules and no thresholds.

The pull of a weight W is |dL/dW| |W| / |L|: the fraction by which the loss would change, to first order, if W changed
by its own norm. It has no unit: multiplying the loss by 1000, or measuring it in bits, changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.curves import held, nanmax, nanmedian
from sonde.diagnose.measures.loss import loss_name
from sonde.diagnose.measures.model import Parameter, structure
from sonde.schema.sketch import Array
from sonde.schema.window import Window, noted

NEEDS: Final = ("grad/*/norm_preclip", "param/*/norm")

_WEIGHT: Final = re.compile(r"(weight|kernel|proj)[^.]*$|(^|\.)w[^.a-z]?$", re.IGNORECASE)
"""Names of weight matrices in modules other than linear layers and convolutions."""

MIN_LOSSES: Final = 5
"""Minimum number of finite losses to compute a profile."""


@dataclass(frozen=True, slots=True)
class Depth:
    """The weight matrices from input to output, and their pull over time."""

    sites: tuple[str, ...]
    steps: NDArray[np.int64]
    pull: Array
    """(sites, steps); NaN where a gradient or the loss is non-finite."""
    grad: Array
    """(sites, steps): gradient norms before clipping."""

    @property
    def front(self) -> Array:
        """Median pull of the third of the layers nearest the input, per step. Not the minimum: queries and keys may
        have almost no gradient in a model whose gradient reaches the input."""
        return np.asarray(nanmedian(self.pull[: max(1, len(self.sites) // 3)], axis=0))

    @property
    def back(self) -> Array:
        """Largest pull in the third of the layers nearest the output, per step."""
        return np.asarray(nanmax(self.pull[-max(1, len(self.sites) // 3) :], axis=0))


def path(window: Window) -> list[Parameter]:
    """Trainable weights of linear layers and convolutions, from input to output. Leaves out adapters and parameters
    that are not multiplied with an input: tokens, positions, attention biases, decay rates."""
    model = structure(window)
    called = {module.name: module for module in model.modules if module.order >= 0}
    layers = {module.name for module in model.modules if module.kind in ("linear", "conv")}
    return [
        weight
        for weight in model.matrices
        if not weight.is_lora
        and (weight.owner in called or not called)
        and (weight.owner in layers or _WEIGHT.search(weight.name) is not None)
        and not weight.module_type.startswith(("RNN", "LSTM", "GRU"))
    ]


@noted
def depth(window: Window) -> Depth | None:
    """The pull of each layer over depth; None if fewer than two matrices are trained or the loss is unknown."""
    name = loss_name(window)
    loss_steps, loss = window.get(name) if name is not None else (np.empty(0, np.int64), np.empty(0))
    sites = [weight.name for weight in path(window) if len(window.get(f"grad/{weight.name}/norm_preclip")[0])]
    if np.isfinite(loss).sum() < MIN_LOSSES or len(sites) < 2:
        return None
    steps = np.unique(np.concatenate([window.get(f"grad/{site}/norm_preclip")[0] for site in sites]))
    grad = np.stack([held(steps, *window.get(f"grad/{site}/norm_preclip")) for site in sites])
    weight = np.stack([held(steps, *window.get(f"param/{site}/norm")) for site in sites])
    level = np.abs(held(steps, loss_steps, loss))
    with np.errstate(all="ignore"):
        pull = grad * weight / level
    pull[~np.isfinite(pull)] = np.nan
    usable = np.isfinite(pull).any(axis=0)
    return Depth(tuple(sites), steps[usable], pull[:, usable], grad[:, usable]) if usable.any() else None
