"""The learning rate is too high: steps are as large as the weights, and the loss does not get over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.motion import FIRST, NEEDS, Motion, motion
from sonde.diagnose.measures.rate import write_rate
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

LARGE: Final = 0.3
"""Share of its own size that a weight matrix moves in one step. Healthy runs: below 0.1, also at their first steps."""
LARGE_LATER: Final = 0.15
"""The same once training is under way, when steps should have become small."""
BEFORE: Final = 15
"""Steps from a large step to the height of the loss it leads to."""
HEALTHY: Final = "1e-4 to 0.1"
SOON: Final = 30
FAR: Final = 2.2
"""Length of the first steps laid end to end, beside the size of the weights. Healthy runs: below 1.9."""
EARLY: Final = 10
"""Steps within which a step that was too large shows in the loss."""


@rule(
    severity="warning",
    needs=NEEDS,
    causes=(
        *("dead_relu", "loss_spikes", "loss_oscillation", "loss_divergence", "loss_plateau", "exploding_gradients"),
        *("nan_inf", "underfitting", "saturated_activations"),
        *("constant_output", "rank_collapse", "vanishing_gradients", "bottleneck_layer"),
        *("adam_second_moment_underestimate", "clip_too_tight", "low_precision_overflow", "bad_batches"),
        "qkv_imbalance",
    ),
    references=(
        "Karpathy, CS231n: ratio of updates to weights about 1e-3",
        "Ben Braiek and Khomh 2022, TheDeepChecker: log10 of the ratio above -1",
        "Cohen et al. 2021, training at the edge of stability",
    ),
)
def lr_too_high(window: Window) -> Iterator[Found]:
    """The learning rate is too high: updates are as large as the weights they change, and the loss suffers."""
    moved, loss = motion(window), learned(window)
    if moved is None or loss is None or not loss.first > 0:
        return
    if moved.at_first > LARGE and _is_harmed(loss, moved.at_first):
        yield _from_the_start(window, moved, loss)
    elif (step := _fell_apart(moved, loss)) is not None:
        yield _later(window, moved, loss, step)
    elif _way(moved) > FAR and loss.left > 0.8:
        yield _carried_away(window, moved, loss)


def _is_harmed(loss: Learned, first_move: float) -> bool:
    """Large first steps alone are no fault: convex problems and RMSprop's first step bear them."""
    if loss.has_diverged:
        return True
    jump = _highest(loss, 1, EARLY + 1) / loss.first
    later = _highest(loss, len(loss.values) // 4, None) / loss.unit
    if loss.left > 0.6:
        return jump > 1.1 or loss.left > 1.1
    return (loss.left > 0.35 and jump > 2.0) or (loss.left > 0.4 and later > 0.8 and first_move > 0.5)


def _highest(loss: Learned, first: int, last: int | None) -> float:
    values = loss.values[first:last]
    return float(nanmax(values)) if np.isfinite(values).any() else np.inf


def _fell_apart(moved: Motion, loss: Learned) -> int | None:
    """The step at which a loss that had fallen was thrown back to where it began, by one large step."""
    if not (loss.best_left < 0.7 and loss.left > 0.8 and loss.end > 2 * loss.best):
        return None
    peak = int(loss.steps[int(np.nanargmax(np.where(np.isfinite(loss.values), loss.values, np.nan)))])
    near = (moved.steps >= peak - BEFORE) & (moved.steps <= peak)
    large = np.flatnonzero((moved.of_step > LARGE_LATER) & near)
    return int(moved.steps[large[0]]) if len(large) else None


def _way(moved: Motion) -> float:
    """Momentum makes steps long only after a while: how far the weights went in the first steps."""
    return float(np.nansum(moved.of_step[:SOON]))


def _carried_away(window: Window, moved: Motion, loss: Learned) -> Found:
    size = float(nanmax(moved.of_step[:SOON]))
    step = int(moved.steps[int(np.nanargmax(moved.of_step[:SOON]))])
    return Found(
        f"the learning rate is too high: in the first {SOON} steps the weights went {_way(moved):.1f} times their own "
        f"size (up to {size:.0%} in one step), and {loss.left:.0%} of the loss is left",
        step=int(moved.steps[0]),
        confidence=0.65,
        sites=moved.sites[:1],
        evidence=_evidence(loss, moved.sites[0], size, step),
        remedy=f"{write_rate(window, 0.1)}; with momentum, steps become 1 / (1 - momentum) times as long.",
    )


def _from_the_start(window: Window, moved: Motion, loss: Learned) -> Found:
    first = moved.ratios[:, :FIRST]
    worst = int(np.nanargmax(np.fmax.reduce(first, axis=1)))
    step = int(moved.steps[int(np.nanargmax(first[worst] > LARGE))])
    site = moved.sites[worst]
    what = "and the loss was no longer finite" if loss.has_diverged else f"and {loss.left:.0%} of the loss is left"
    return Found(
        f"the learning rate is too high: one of the first {FIRST} updates of {site} was {_times(moved.at_first)} "
        f"as large as the weight itself (step {step}), {what} at the end",
        step=step,
        confidence=0.85 if moved.at_first > 1 else 0.75,
        sites=[s for s, row in zip(moved.sites, first, strict=True) if np.fmax.reduce(row) > LARGE],
        evidence=_evidence(loss, site, moved.at_first, step),
        remedy=f"{write_rate(window, _factor(moved.at_first))}; or raise it over the first hundred steps (warm-up).",
    )


def _later(window: Window, moved: Motion, loss: Learned, step: int) -> Found:
    at = int(np.searchsorted(moved.steps, step))
    size = float(nanmax(moved.of_step))
    site = moved.sites[int(np.nanargmax(moved.ratios[:, at]))]
    return Found(
        f"the learning rate is too high: at step {step} an update was {_times(float(moved.of_step[at]))} as large as "
        f"the weights, and a loss that had fallen to {loss.best_left:.0%} is back at {loss.left:.0%} of its start",
        step=step,
        confidence=0.65,
        sites=(site,),
        evidence=_evidence(loss, site, size, step),
        remedy=f"{write_rate(window, 0.1)}; or clip_grad_norm_(model.parameters(), 1.0) before optimizer.step().",
    )


def _evidence(loss: Learned, site: str, size: float, step: int) -> list[Evidence]:
    early = _highest(loss, 1, EARLY + 1) / loss.first
    return [
        Evidence(f"update/{site}/ratio", size, HEALTHY, step, "norm of the update over norm of the weight"),
        Evidence(
            loss.name, early, "below 1.5", int(loss.steps[0]), "highest loss of the first ten steps over the first"
        ),
        Evidence(loss.name, loss.left, "falling", int(loss.steps[-1]), "share of the loss that is left"),
    ]


def _factor(size: float) -> float:
    """What brings the first updates to two hundredths of the weights; at least ten times less."""
    return min(0.1, 0.02 / size)


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 100 else f"{ratio:.0e} times"
