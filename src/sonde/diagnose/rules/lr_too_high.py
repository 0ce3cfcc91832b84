"""The learning rate is too high: updates are as large as the weights, and the loss does not recover."""

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
from sonde.diagnose.wording import number, percent, times
from sonde.schema.window import Window

LARGE: Final = 0.3
"""Update relative to the weight matrix. Healthy runs stay below 0.1, even in their first steps."""
LARGE_LATER: Final = 0.15
"""The same later in training, when steps should be small."""
BEFORE: Final = 15
"""Maximum number of steps from a large update to the peak of the loss that it causes."""
HEALTHY: Final = "1e-4 to 0.1"
SOON: Final = 30
FAR: Final = 2.2
"""Total length of the first steps relative to the weights. Healthy runs stay below 1.9."""
EARLY: Final = 10
"""Number of steps within which a large update shows in the loss."""


@rule(
    severity="warning",
    needs=NEEDS,
    causes=(
        *("dead_relu", "loss_spikes", "loss_oscillation", "loss_divergence", "loss_plateau", "exploding_gradients"),
        *("nan_inf", "underfitting", "saturated_activations"),
        *("constant_output", "rank_collapse", "vanishing_gradients", "bottleneck_layer"),
        *("adam_second_moment_underestimate", "clip_too_tight", "low_precision_overflow", "bad_batches"),
        *("qkv_imbalance", "attention_entropy_collapse", "attention_logit_growth", "output_logit_growth"),
    ),
    references=(
        "Karpathy, CS231n: ratio of updates to weights about 1e-3",
        "Ben Braiek and Khomh 2022, TheDeepChecker: log10 of the ratio above -1",
        "Cohen et al. 2021, training at the edge of stability",
    ),
)
def lr_too_high(window: Window) -> Iterator[Found]:
    """The learning rate is too high: updates are as large as the weights they change, and the loss does not fall."""
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
    """Whether large first steps did harm. Alone they are harmless in convex problems and in RMSprop's first step."""
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
    """The step of the large update that threw a loss that had fallen back to where it started."""
    if not (loss.best_left < 0.7 and loss.left > 0.8 and loss.end > 2 * loss.best):
        return None
    peak = int(loss.steps[int(np.nanargmax(np.where(np.isfinite(loss.values), loss.values, np.nan)))])
    near = (moved.steps >= peak - BEFORE) & (moved.steps <= peak)
    large = np.flatnonzero((moved.of_step > LARGE_LATER) & near)
    return int(moved.steps[large[0]]) if len(large) else None


def _way(moved: Motion) -> float:
    """Total length of the first steps relative to the weights. Momentum makes steps large only after a while."""
    return float(np.nansum(moved.of_step[:SOON]))


def _carried_away(window: Window, moved: Motion, loss: Learned) -> Found:
    size = float(nanmax(moved.of_step[:SOON]))
    step = int(moved.steps[int(np.nanargmax(moved.of_step[:SOON]))])
    return Found(
        f"The learning rate is too high: in the first {SOON} steps the weights moved by {number(_way(moved))} times "
        f"their own norm (up to {percent(size)} in one step), and {loss.outcome}.",
        step=int(moved.steps[0]),
        confidence=0.65,
        sites=moved.sites[:1],
        evidence=_evidence(loss, moved.sites[0], size, step),
        remedy=f"{write_rate(window, 0.1)}. With momentum, steps become 1 / (1 - momentum) times as large.",
    )


def _from_the_start(window: Window, moved: Motion, loss: Learned) -> Found:
    first = moved.ratios[:, :FIRST]
    worst = int(np.nanargmax(np.fmax.reduce(first, axis=1)))
    step = int(moved.steps[int(np.nanargmax(first[worst] > LARGE))])
    site = moved.sites[worst]
    return Found(
        f"The learning rate is too high: an early update of {site} (step {step:,}) had "
        f"{times(moved.at_first)} the norm of the weight itself, and {loss.outcome}.",
        step=step,
        confidence=0.85 if moved.at_first > 1 else 0.75,
        sites=[s for s, row in zip(moved.sites, first, strict=True) if np.fmax.reduce(row) > LARGE],
        evidence=_evidence(loss, site, moved.at_first, step),
        remedy=f"{write_rate(window, _factor(moved.at_first))}. Or warm it up over the first hundred steps.",
    )


def _later(window: Window, moved: Motion, loss: Learned, step: int) -> Found:
    at = int(np.searchsorted(moved.steps, step))
    size = float(nanmax(moved.of_step))
    site = moved.sites[int(np.nanargmax(moved.ratios[:, at]))]
    return Found(
        f"The learning rate is too high: at step {step:,} an update had {times(float(moved.of_step[at]))} the norm of "
        f"the weights, and the loss, which had fallen to {percent(loss.best_left)} of {loss.reference}, "
        f"{f'is back at {percent(loss.left)}' if np.isfinite(loss.left) else 'ends as NaN or infinity'}.",
        step=step,
        confidence=0.65,
        sites=(site,),
        evidence=_evidence(loss, site, size, step),
        remedy=f"{write_rate(window, 0.1)}. Or clip gradients before `optimizer.step()`: "
        "`clip_grad_norm_(model.parameters(), 1.0)`.",
    )


def _evidence(loss: Learned, site: str, size: float, step: int) -> list[Evidence]:
    early = _highest(loss, 1, EARLY + 1) / loss.first
    return [
        Evidence(f"update/{site}/ratio", size, HEALTHY, step, "update norm / weight norm"),
        Evidence(loss.name, early, "below 1.5", int(loss.steps[0]), "highest loss of the first ten steps / first loss"),
        loss.left_evidence(),
    ]


def _factor(size: float) -> float:
    """The factor that brings the first updates to 2 % of the weights; at most a tenth."""
    return min(0.1, 0.02 / size)
