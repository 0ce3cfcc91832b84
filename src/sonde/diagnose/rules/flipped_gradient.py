"""Training increases the loss: the update follows the gradient, or the gradient has the wrong sign."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax, nanmedian, smoothed
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.motion import NEEDS as MOTION
from sonde.diagnose.measures.motion import motion
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

UPHILL: Final = 0.3
"""Cosine of update and gradient; -1 for plain gradient descent."""
SMALL_STEPS: Final = 0.2
"""First update relative to the weight; above it, steps that are too large explain the rise."""
EARLY: Final = 5
ALIKE: Final = 1e-3
"""Relative difference between a loss and minus what its loss function returned."""
UNBOUNDED: Final = 10.0
"""Rise of such a loss; a part that is to be maximised, as in a game of two networks, stays bounded."""
ROSE: Final = 1.5
CHUNKS: Final = 12


@rule(
    severity="warning",
    needs=(*MOTION, "update/*/grad_cosine", "update/*/grad_update_dot"),
    causes=(
        *("loss_divergence", "exploding_gradients", "nan_inf", "lr_too_high", "underfitting", "output_logit_growth"),
        *("saturated_activations", "dead_relu", "loss_spikes", "attention_logit_growth", "loss_oscillation"),
        *(
            "attention_entropy_collapse",
            "overfitting",
            "label_shuffling",
            "constant_output",
            "init_scale",
            "low_precision_overflow",
        ),
    ),
    references=("Ben Braiek and Khomh 2022, TheDeepChecker: flipped sign of the gradient",),
)
def flipped_gradient(window: Window) -> Iterator[Found]:
    """The loss rises steadily because the update, or the gradient, has the wrong sign."""
    loss = learned(window)
    if loss is None:
        return
    if (negated := _negated(window, loss)) is not None:
        yield negated
    if not loss.end > ROSE * loss.first > 0:
        return
    cosines = window.grid("update/*/grad_cosine")
    typical = float(nanmedian(cosines.values)) if cosines.values.size else np.nan
    if typical > UPHILL:
        yield _finding(loss, typical, "updates point along the gradient instead of against it", 0.95)
    elif _rises_as_it_should_fall(window, loss):
        yield _finding(loss, typical, "the loss rises by as much as it should have fallen", 0.8)


def _negated(window: Window, loss: Learned) -> Found | None:
    """A loss that is minus what its loss function returned, which therefore rises without bound."""
    own_steps, own = window.get("data/loss/value")
    _, mine, theirs = np.intersect1d(loss.steps, own_steps, return_indices=True)
    total, part = loss.values[mine], own[theirs]
    usable = np.isfinite(total) & np.isfinite(part) & (np.abs(part) > 0)
    total, part = total[usable], part[usable]
    if len(total) < EARLY or len(structure(window).optimizers) > 1:
        return None
    if not np.allclose(total, -part, rtol=ALIKE) or not (part > 0).all() or not part[-1] > UNBOUNDED * part[0]:
        return None
    name, first = structure(window).loss or "loss function", int(loss.steps[0])
    return Found(
        f"Training increases the loss: it minimises minus what {name} returns, which has risen from "
        f"{number(float(part[0]))} to {number(float(part[-1]))}.",
        step=first,
        confidence=0.95,
        evidence=[
            Evidence("data/loss/value", float(part[-1]), f"below {number(float(part[0]))}", int(own_steps[theirs][-1]))
        ],
        remedy="Remove the minus sign: `loss = loss_fn(output, target)`.",
    )


def _rises_as_it_should_fall(window: Window, loss: Learned) -> bool:
    """Whether the loss climbs steadily although every small step should lower it: the gradient has the wrong sign."""
    moved = motion(window)
    if moved is None or not len(moved.steps) or len(structure(window).optimizers) > 1:
        return False
    if not float(np.fmax.reduce(moved.ratios[:, 0])) < SMALL_STEPS or _overshoots(window):
        return False
    return _is_steady_climb(loss) and _promise_is_broken(window, loss)


def _overshoots(window: Window) -> bool:
    """Whether successive gradients reverse, as they do when a step overshoots; while climbing, they agree."""
    cosines = window.get("model/model/grad_cosine")[1]
    early = cosines[np.isfinite(cosines)][:EARLY]
    return bool(len(early)) and bool(np.median(early) < 0.1)


def _is_steady_climb(loss: Learned) -> bool:
    values = loss.values[np.isfinite(loss.values)]
    values = values[: max(int(np.argmax(values)) + 1, len(values) // 2)]
    levels = [float(np.median(chunk)) for chunk in np.array_split(values, CHUNKS) if len(chunk)]
    rises = np.diff(np.log(np.maximum(levels, 1e-30)))
    return bool(len(rises) and (rises > 0).mean() >= 0.9 and smoothed(values, 5).min() > 0.8 * _start(loss))


def _promise_is_broken(window: Window, loss: Learned) -> bool:
    """Whether <gradient, update> predicts a fall over the early steps, but the loss rose by about as much or more."""
    dots = window.grid("update/*/grad_update_dot")
    if not dots.values.size:
        return False
    early = max(5, len(loss.values) // 5)
    promised = np.cumsum(np.nansum(dots.values[:, :early], axis=0))
    reached = loss.values[max(early - 2, 1) : early + 3]
    if not len(promised) or not np.isfinite(reached[:2]).all():
        return False
    happened = float(nanmax(reached[np.isfinite(reached)])) - _start(loss)
    return bool(promised[-1] < 0 and happened > -0.3 * promised[-1])


def _start(loss: Learned) -> float:
    """The loss at the start, not affected by an unusual first batch."""
    return min(loss.first, float(np.median(loss.values[:EARLY])))


def _finding(loss: Learned, cosine: float, why: str, confidence: float) -> Found:
    first, last = int(loss.steps[0]), int(loss.steps[-1])
    return Found(
        f"Training increases the loss: it is {number(loss.end / loss.first)} times what it was at step {first:,}, "
        f"and {why}.",
        step=first,
        confidence=confidence,
        evidence=[
            Evidence(loss.name, loss.end / loss.first, "below 1", last, "final loss / first loss"),
            Evidence("update/*/grad_cosine", cosine, "-1 to 0", None, "median cosine of update and gradient"),
        ],
        remedy="Look for a wrong sign: `optimizer(maximize=True)`, `loss = -loss`, a gradient hook that negates, or "
        "`p.data += lr * p.grad` instead of `-=`.",
    )
