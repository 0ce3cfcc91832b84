"""A few batches are unlike the others: loss and gradient jump on them although the previous update was ordinary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.loss import Spike, find_spikes, learned
from sonde.diagnose.measures.motion import NEEDS as MOTION
from sonde.diagnose.measures.motion import motion
from sonde.diagnose.measures.total_gradient import NEEDS as GRADIENT
from sonde.diagnose.measures.total_gradient import total_norm
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Column, Window

OUTLYING: Final = 50.0
"""Squared gradient norm divided by its recent mean (SPAM's spike score)."""
ORDINARY: Final = 3.0
"""Maximum update before a bad batch, relative to a usual one; a larger update may itself have caused the spike."""
SEVERAL: Final = 2
BACK: Final = 20
FEW: Final = 0.2


@rule(
    severity="warning",
    needs=(*MOTION, *GRADIENT),
    causes=("loss_spikes", "exploding_gradients", "adam_second_moment_underestimate", "loss_oscillation"),
    references=(
        "Chowdhery et al. 2022, PaLM: spikes came from particular batches at particular states",
        "Huang et al. 2025, SPAM: gradient spike score above 50",
    ),
)
def bad_batches(window: Window) -> Iterator[Found]:
    """A few batches have a loss and a gradient far outside the usual range."""
    loss = learned(window)
    if loss is None or not loss.unit > 0:
        return
    bad = [spike for spike in find_spikes(loss, spreads=6.0, share=0.5) if _is_from_batch(window, spike)]
    if len(bad) < SEVERAL or len(bad) > FEW * len(loss.values):
        return
    scores = [_score(total_norm(window), spike.step) for spike in bad]
    named = ", ".join(_name(window, spike.step) for spike in bad[:5]) + (", ..." if len(bad) > 5 else "")
    yield Found(
        f"{len(bad)} of {len(loss.values):,} batches are unlike the others: at steps {named} the loss jumped to up to "
        f"{number(max(spike.height for spike in bad))} times its recent level, after ordinary updates.",
        step=bad[0].step,
        last_step=bad[-1].step,
        confidence=0.85,
        evidence=[
            Evidence(
                "grad/*/norm_preclip",
                float(np.median(scores)),
                "below 50",
                bad[0].step,
                "squared gradient norm / its recent mean",
            ),
            Evidence(loss.name, max(spike.height for spike in bad), "below 3", bad[0].step, "loss / its recent median"),
            *_input(window, bad),
        ],
        remedy="Inspect these batches (corrupt files, a different scale, wrong labels) and filter them out of the data "
        "set. Until then, skip steps whose gradient norm is ten times its running mean.",
    )


def _is_from_batch(window: Window, spike: Spike) -> bool:
    return _score(total_norm(window), spike.step) > OUTLYING and not _is_from_step(window, spike.step)


def _score(column: Column, step: int) -> float:
    """Squared norm at a step divided by the median square of the previous steps."""
    steps, norms = column
    at = int(np.searchsorted(steps, step))
    if at >= len(steps) or steps[at] != step:
        return 0.0
    recent = norms[max(0, at - BACK) : at]
    usual = float(np.median(np.square(recent))) if len(recent) else 0.0
    return float(norms[at] ** 2 / usual) if usual > 0 else 0.0


def _is_from_step(window: Window, step: int) -> bool:
    """Whether the previous update was itself unusually large."""
    moved = motion(window)
    if moved is None:
        return False
    sizes, at = moved.of_step, int(np.searchsorted(moved.steps, step))
    recent = sizes[max(0, at - BACK) : max(at - 1, 0)]
    return bool(at > 1 and len(recent) and sizes[at - 1] > ORDINARY * nanmedian(recent))


def _name(window: Window, step: int) -> str:
    """The step, with the hash of the batch if it is known."""
    steps, hashes = window.get("data/batch/hash")
    at = np.flatnonzero(steps == step)
    return f"{step:,} (batch {int(hashes[at[0]]):x})" if len(at) and np.isfinite(hashes[at[0]]) else f"{step:,}"


def _input(window: Window, bad: list[Spike]) -> list[Evidence]:
    """The largest input of the bad batches compared with the others, if one of them was inspected."""
    steps, sizes = window.get("data/input/abs_max")
    inside = np.isin(steps, [spike.step for spike in bad])
    if not inside.any() or inside.all():
        return []
    usual = float(np.median(sizes[~inside]))
    largest, step = float(sizes[inside].max()), int(steps[inside][0])
    return [Evidence("data/input/abs_max", largest, f"about {number(usual)}", step, "largest input")]
