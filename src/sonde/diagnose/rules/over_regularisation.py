"""Weight decay is too strong: the weights shrink towards zero and the model does not learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.rate import one_digit, rate
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent
from sonde.schema.sketch import Array
from sonde.schema.window import Grid, Window

SHRUNK: Final = 0.5
"""Median norm of the weight matrices relative to the start; in healthy training they grow, or at most halve."""
UNLEARNED: Final = 0.6
EXPLAINED: Final = 0.7
"""Sum over steps of learning rate times decay; this value halves a weight."""
OVERWHELMING: Final = 3.0
"""The same sum; this value leaves a twentieth of a weight."""
HALF_LEARNED: Final = 0.25
OUTWEIGHS: Final = 3.0
"""Decay times weight divided by the gradient, in norm, from which the optimizer mostly follows the decay."""


@rule(
    severity="warning",
    needs=("param/*/norm", "param/*/n", "grad/*/norm"),
    causes=(
        *("underfitting", "vanishing_gradients", "loss_plateau", "constant_output", "lr_too_low", "rank_collapse"),
        *("dead_relu", "residual_decay", "bottleneck_layer", "qkv_imbalance", "lr_too_high"),
    ),
    references=(
        "Ben Braiek and Khomh 2022, TheDeepChecker: over-regularisation",
        "Humbatova et al. 2021, DeepCrime: add_weights_regularisation",
    ),
)
def over_regularisation(window: Window) -> Iterator[Found]:
    """Weight decay outweighs the data: weights shrink towards zero and the model does not learn."""
    loss = learned(window)
    shrink = _shrinking(window)
    if loss is None or not shrink:
        return
    left = float(np.median([share for share, _ in shrink.values()]))
    worst = sorted(shrink, key=lambda site: shrink[site][0])[:3]
    decay, total = _decay(window, worst[0])
    is_strong = total > OVERWHELMING
    if not left < SHRUNK or not loss.left > (HALF_LEARNED if is_strong else UNLEARNED) or loss.has_diverged:
        return
    if not is_strong and sum(steady for _, steady in shrink.values()) < 0.5 * len(shrink):
        return
    if not (total > EXPLAINED or _has_penalty(window, loss) or _outweighs_gradients(window, list(shrink), decay)):
        return  # small weights may be the best ones
    yield Found(
        f"Weight decay outweighs the data: the weight matrices have shrunk to {percent(left)} of their initial norm "
        f"({worst[0]} to {percent(shrink[worst[0]][0])}), and {loss.outcome}.",
        step=int(loss.steps[0]),
        confidence=0.85 if decay > 0 else 0.75,
        sites=worst,
        evidence=[
            Evidence(f"param/{worst[0]}/norm", shrink[worst[0]][0], "0.7 to 3", None, "final weight norm / initial"),
            loss.left_evidence(),
        ],
        remedy=(
            f"Lower the weight decay from {number(decay, 3)}: "
            f"`{structure(window).optimizer_type}(..., weight_decay={one_digit(decay / 1000)})`."
            if decay > 0
            else "Make the penalty in the loss a thousand times smaller."
        ),
    )


def _decay(window: Window, site: str) -> tuple[float, float]:
    """The weight decay of a parameter's group, and the sum over all steps of decay times learning rate."""
    known = structure(window)
    parameter = known.parameter(site)
    decay = known.group_value("weight_decay") if parameter is None else known.group_of(parameter).get("weight_decay")
    rates, num_steps = rate(window, parameter)[1], len(rate(window)[1])
    total = float(np.nanmean(rates)) * num_steps * float(decay or 0.0) if np.isfinite(rates).any() else 0.0
    return float(decay or 0.0), total


def _outweighs_gradients(window: Window, sites: list[str], decay: float) -> bool:
    """Whether decay is most of what the optimizer is given. Adam divides the sum of gradient and decay by its own
    size, so that the product of rate and decay says nothing; AdamW keeps them apart."""
    if not decay > 0 or structure(window).optimizer_type == "AdamW":
        return False
    weight = np.array([float(nanmedian(window.get(f"param/{site}/norm")[1])) for site in sites])
    gradient = np.array([float(nanmedian(window.get(f"grad/{site}/norm")[1])) for site in sites])
    with np.errstate(all="ignore"):
        return bool(nanmedian(decay * weight / gradient) > OUTWEIGHS)


def _has_penalty(window: Window, loss: Learned) -> bool:
    """Whether the logged loss started well above the loss function's value: a penalty was added to it."""
    steps, seen = window.get("data/loss/value")
    _, mine, theirs = np.intersect1d(loss.steps, steps, return_indices=True)
    if not len(mine):
        return False
    ratio = loss.values[mine] / np.maximum(seen[theirs], 1e-30)
    return bool(ratio[0] > 1.1 * ratio[-1])


def _shrinking(window: Window) -> dict[str, tuple[float, bool]]:
    """The final norm of each weight matrix relative to the start, and whether it shrank steadily, not in one jump."""
    norms: Grid = window.grid("param/*/norm")
    known = {p.name for p in structure(window).matrices}
    found = {}
    for site in norms.sites:
        size = window.get(f"param/{site}/n")[1]
        row = norms.row(site)
        row = row[np.isfinite(row)]
        is_matrix = site in known if known else bool(len(size)) and size[0] >= 64
        if is_matrix and len(row) > 10 and row[0] > 0:
            found[site] = (float(np.median(row[-5:]) / row[0]), _is_steady(row))
    return found


def _is_steady(row: Array) -> bool:
    """Whether the norm falls in most steps until it is small."""
    falling = row[: max(10, int(np.argmax(row < 0.3 * row[0]))) or None] if (row < 0.3 * row[0]).any() else row
    return bool((np.diff(falling) < 0).mean() > 0.8)
