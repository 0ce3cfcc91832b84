"""The learning rate is too high: updates are as large as the weights, and the loss does not recover."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.measures.divergence import GROWN, LARGE, Divergence, divergence
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.motion import FIRST, NEEDS, Motion, motion
from sonde.diagnose.measures.nonfinite import NEEDS as NONFINITE
from sonde.diagnose.measures.rate import RATE, rate, stable_rate, write_new_rate, write_rate
from sonde.diagnose.measures.readings import highest, reading
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent, times
from sonde.schema.window import Window

LARGE_LATER: Final = 0.15
"""The same later in training, when steps should be small."""
BEFORE: Final = 15
"""Maximum number of steps from a large update to the peak of the loss that it causes."""
HEALTHY: Final = "1e-4 to 0.1"
SOON: Final = 30
FAR: Final = 2.2
"""Total length of the first steps relative to the weights. Healthy runs stay below 1.9."""
LEARNED: Final = 0.1
"""Final loss as a fraction of its start; a run that ends below it recovered from its first steps."""
FLUNG: Final = 10.0
"""Loss relative to its start, after the first quarter of the run. Chosen by hand."""
RAISED: Final = 3.0
"""Rise of the learning rate within one step; warm-ups and cycles rise by a few percent per step."""
WORSE: Final = 3.0
"""Final loss divided by its level before the rise."""
EARLY: Final = 10
"""Number of steps within which a large update shows in the loss."""
REPLACED: Final = 1.0
"""An early update as large as the weight itself: what the weight was before no longer matters. The largest of 151
generated runs without a fault is 0.23."""
THROWN: Final = 10.0
"""Rise of the loss over its start within the first steps, after which a run has lost its initialisation even if it
learns later. The largest of 151 generated runs without a fault is 2.4."""


@rule(
    severity="warning",
    needs=(*NEEDS, *NONFINITE, "update/*/ratio"),
    causes=(
        *("dead_relu", "loss_spikes", "loss_oscillation", "loss_divergence", "loss_plateau", "exploding_gradients"),
        *("nan_inf", "underfitting", "saturated_activations"),
        *("constant_output", "rank_collapse", "vanishing_gradients", "bottleneck_layer"),
        *("adam_second_moment_underestimate", "clip_too_tight", "low_precision_overflow", "bad_batches"),
        *("qkv_imbalance", "attention_logit_growth", "attention_entropy_collapse", "output_logit_growth"),
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
    if (run := divergence(window)) is not None:
        yield _ran_away(window, moved, loss, run)
    elif moved.at_first > LARGE and _is_harmed(loss, moved.at_first):
        yield _from_the_start(window, moved, loss)
    elif (step := _fell_apart(moved, loss)) is not None:
        yield _later(window, moved, loss, step)
    elif (step := _raised(window, loss)) is not None:
        yield _after_a_rise(window, moved, loss, step)
    elif _way(moved) > FAR and loss.left > 0.8:
        yield _carried_away(window, moved, loss)


def _is_harmed(loss: Learned, first_move: float) -> bool:
    """Whether large first steps did harm. Alone they are harmless in convex problems and in RMSprop's first step.
    NaN without a divergence came from elsewhere."""
    if loss.has_diverged:
        return False
    jump = _highest(loss, 1, EARLY + 1) / loss.first
    if jump > THROWN and np.isfinite(loss.values[1 : EARLY + 1]).all():
        return True
    later = _highest(loss, len(loss.values) // 4, None) / loss.unit
    if later > FLUNG and loss.left > LEARNED:
        return True
    if loss.left > 0.6:
        return jump > 1.1 or loss.left > 1.1 or first_move > REPLACED
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


def _raised(window: Window, loss: Learned) -> int | None:
    """The step at which the learning rate rose RAISED times at once and the loss left its level for good."""
    steps, values = rate(window)
    if len(values) < 2 or loss.has_diverged:
        return None
    with np.errstate(all="ignore"):
        jumps = np.flatnonzero((values[1:] > RAISED * values[:-1]) & (values[:-1] > 0)) + 1
    for step in steps[jumps]:
        before, after = loss.values[loss.steps < step][-2 * EARLY :], loss.values[loss.steps >= step]
        if len(before) >= EARLY and len(after) >= EARLY and loss.end > WORSE * np.median(before):
            top = float(nanmax(after))
            if top - np.median(before) > 0.2 * loss.unit:
                return int(step)
    return None


def _after_a_rise(window: Window, moved: Motion, loss: Learned, step: int) -> Found:
    at = min(int(np.searchsorted(moved.steps, step)), len(moved.steps) - 1)
    site = moved.sites[int(np.argmax(np.nan_to_num(moved.ratios[:, at])))]
    old, new = stable_rate(window, step, float(np.fmax.reduce(moved.ratios[:, at]))) or (np.nan, np.nan)
    level = float(np.median(loss.values[loss.steps < step][-2 * EARLY :]))
    return Found(
        f"The learning rate has been too high since it rose from {number(new)} to {number(old)} at step {step:,}: the "
        f"loss had been {number(level)} before, and ends at {number(loss.end)}.",
        step=step,
        confidence=0.8,
        sites=(site,),
        evidence=[
            highest(window, loss.name, f"below {number(WORSE * level)}", "highest loss after the rise", since=step),
            reading(window, RATE, step, f"below {number(old)}", "learning rate"),
        ],
        remedy=f"{write_new_rate(window, old, new)}. Check the schedule at this step.",
    )


def _way(moved: Motion) -> float:
    """Total length of the first steps relative to the weights. Momentum makes steps large only after a while."""
    return float(np.nansum(moved.of_step[:SOON]))


def _ran_away(window: Window, moved: Motion, loss: Learned, run: Divergence) -> Found:
    rise = f"the loss rose from {number(loss.first)} to {number(run.top)} by step {run.top_step:,}"
    if not run.top > GROWN * loss.first:
        rise = "the loss exploded"
    end = f"; at step {run.overflow:,} values overflowed to NaN or infinity" if run.overflow is not None else ""
    return Found(
        f"The learning rate is too high: at step {run.step:,} the update of {run.site} had {times(run.size)} the norm "
        f"of the weight itself, and {rise}{end}.",
        step=run.step,
        severity="critical" if run.overflow is not None else None,
        confidence=0.95 if run.overflow is not None else 0.85,
        sites=[run.site, *(site for site in _thrown(moved, run.step) if site != run.site)],
        evidence=[
            reading(window, f"update/{run.site}/ratio", run.step, HEALTHY, "update norm / weight norm"),
            reading(window, loss.name, run.top_step, f"below {number(1.5 * loss.first, 3)}", "highest finite loss"),
        ],
        remedy=_remedy(window, run.step, max(run.size, float(np.fmax.reduce(moved.ratios[:, 0]))), run.growth),
    )


def _thrown(moved: Motion, step: int) -> list[str]:
    """The weights with a large update at a step."""
    at = int(np.searchsorted(moved.steps, step))
    return [site for site, size in zip(moved.sites, moved.ratios[:, at], strict=True) if size > LARGE]


def _remedy(window: Window, step: int, size: float, growth: float = np.nan) -> str:
    rates = stable_rate(window, step, size, growth)
    lower = write_new_rate(window, *rates) if rates is not None else write_rate(window, 0.1)
    return f"{lower}. Or warm it up over the first hundred steps."


def _carried_away(window: Window, moved: Motion, loss: Learned) -> Found:
    size = float(nanmax(moved.of_step[:SOON]))
    step = int(moved.steps[int(np.nanargmax(moved.of_step[:SOON]))])
    at = int(np.searchsorted(moved.steps, step))
    site = moved.sites[int(np.nanargmax(moved.ratios[:, at]))]
    return Found(
        f"The learning rate is too high: in the first {SOON} steps the weights moved by {number(_way(moved))} times "
        f"their own norm (up to {percent(size)} in one step), and {loss.outcome}.",
        step=int(moved.steps[0]),
        confidence=0.65,
        sites=(site,),
        evidence=_evidence(window, loss, site, step),
        remedy=f"{write_rate(window, 0.1)}. With momentum, steps become 1 / (1 - momentum) times as large.",
    )


def _from_the_start(window: Window, moved: Motion, loss: Learned) -> Found:
    first = moved.ratios[:, :FIRST]
    worst, at = (int(i) for i in np.unravel_index(np.nanargmax(first), first.shape))
    step, site, size = int(moved.steps[at]), moved.sites[worst], float(first[worst, at])
    return Found(
        f"The learning rate is too high: an early update of {site} (step {step:,}) had "
        f"{times(size)} the norm of the weight itself, and {loss.outcome}.",
        step=int(moved.steps[int(np.argmax(np.fmax.reduce(first, axis=0) > LARGE))]),
        confidence=0.85 if size > 1 else 0.75,
        sites=[s for s, row in zip(moved.sites, first, strict=True) if np.fmax.reduce(row) > LARGE],
        evidence=_evidence(window, loss, site, step),
        remedy=_remedy(window, step, size),
    )


def _later(window: Window, moved: Motion, loss: Learned, step: int) -> Found:
    at = int(np.searchsorted(moved.steps, step))
    site = moved.sites[int(np.nanargmax(moved.ratios[:, at]))]
    return Found(
        f"The learning rate is too high: at step {step:,} an update had {times(float(moved.of_step[at]))} the norm of "
        f"the weights, and the loss, which had fallen to {percent(loss.best_left)} of {loss.reference}, "
        f"{f'is back at {percent(loss.left)}' if np.isfinite(loss.left) else 'ends as NaN or infinity'}.",
        step=step,
        confidence=0.65,
        sites=(site,),
        evidence=_evidence(window, loss, site, step),
        remedy=f"{write_rate(window, 0.1)}. Or clip gradients before `optimizer.step()`: "
        "`clip_grad_norm_(model.parameters(), 1.0)`.",
    )


def _evidence(window: Window, loss: Learned, site: str, step: int) -> list[Evidence]:
    """The update and the losses that show it. An update is compared with the usual norm of such a weight, so its
    recorded ratio may be within the healthy range."""
    update = reading(window, f"update/{site}/ratio", step, "", "update norm / weight norm")
    highest_loss = highest(
        window, loss.name, "", "highest loss of the first ten steps", until=int(loss.steps[0]) + EARLY
    )
    return [
        replace(update, healthy=HEALTHY) if update.value > 0.1 else update,
        replace(highest_loss, healthy=f"below {number(1.5 * loss.first, 3)}")
        if highest_loss.value > 1.5 * loss.first
        else highest_loss,
        loss.left_evidence(),
    ]
