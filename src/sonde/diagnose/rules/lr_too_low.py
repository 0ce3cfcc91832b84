"""The learning rate is too low: every update is tiny compared with the weights, and almost nothing is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.motion import NEEDS, Motion, motion
from sonde.diagnose.measures.rate import endless_warmup, is_at_full_rate, is_still_rising, write_rate
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent
from sonde.schema.window import Window

SMALL: Final = 1.5e-4
"""Median update relative to the weight matrix. Healthy runs: 7e-4 to 2e-2."""
SMALLISH: Final = 5e-4
"""The same limit if the loss falls slowly and steadily: larger steps would make it fall faster."""
SMALL_FOR_ALL: Final = 1e-3
"""The same for the matrix with the largest updates: with vanishing gradients, the last layer still moves."""
VERY_SMALL: Final = 3e-5
SHORT: Final = 0.08
"""Total length of all steps relative to the weights: a long run can succeed with small steps."""
UNLEARNED: Final = 0.6
STEADY_LEFT: Final = 0.8


@rule(
    severity="warning",
    needs=NEEDS,
    causes=("underfitting", "loss_plateau", "constant_output", "rnn_vanishing_temporal"),
    references=(
        "Ben Braiek and Khomh 2022, TheDeepChecker: log10 of the ratio of updates to weights below -4",
        "Wardat et al. 2022, DeepDiagnosis",
    ),
)
def lr_too_low(window: Window) -> Iterator[Found]:
    """The learning rate is too low: updates are tiny compared with the weights, and the loss has hardly fallen."""
    moved, loss = motion(window), learned(window)
    if moved is None or loss is None:
        return
    if is_still_rising(window):
        yield from _never_warm(window, moved, loss)
        return
    per_site = _typical(window, moved)
    if not len(per_site) or per_site.max() > SMALL_FOR_ALL:
        return
    size = float(np.median(per_site))
    if not 0 < size < SMALL and not (size < SMALLISH and _falls_steadily(loss)):
        return
    is_known = np.isfinite(loss.guessing)
    unlearned = loss.end / loss.guessing if is_known else loss.left
    if not unlearned > UNLEARNED or not loss.left > UNLEARNED or (not is_known and size > VERY_SMALL):
        return
    if size * len(loss.values) > SHORT or nanmax(moved.largest_of_step) > 0.02:
        return
    yield Found(
        f"The learning rate is too low: a typical step changes the weights by {percent(size)} of their norm, and after "
        f"{len(loss.values):,} steps {loss.outcome}.",
        step=int(moved.steps[0]),
        confidence=0.8 if is_known else 0.7,
        sites=moved.sites[:3],
        evidence=[
            Evidence(f"update/{moved.sites[0]}/ratio", size, "7e-4 to 2e-2", None, "update norm / weight norm, median"),
            loss.left_evidence(),
        ],
        remedy=f"{write_rate(window, min(1e4, max(10.0, 2e-3 / max(size, 1e-12))))}.",
    )


def _never_warm(window: Window, moved: Motion, loss: Learned) -> Iterator[Found]:
    """The run is over, and its warm-up is not."""
    warmup = endless_warmup(window)
    if warmup is None or not loss.left > UNLEARNED:
        return
    size = float(np.nanmedian(moved.ratios[:, -max(len(moved.steps) // 4, 1) :]))
    if not size < SMALL_FOR_ALL:
        return
    yield Found(
        f"The learning rate is too low because its warm-up never ends: after {warmup.num_steps:,} steps it is still "
        f"rising, at {number(warmup.reached, 2)}, and {loss.outcome}.",
        step=int(moved.steps[0]),
        confidence=0.85,
        sites=moved.sites[:3],
        evidence=[
            Evidence("optim/lr", warmup.reached, "at its peak", int(moved.steps[-1]), "learning rate at the end"),
            Evidence(f"update/{moved.sites[0]}/ratio", size, "7e-4 to 2e-2", None, "update norm / weight norm, median"),
            loss.left_evidence(),
        ],
        remedy=f"Warm up for a tenth of the run: `warmup_steps={max(warmup.num_steps // 10, 1)}`. Check that the "
        "warm-up counts optimizer steps, not samples or tokens.",
    )


def _falls_steadily(loss: Learned) -> bool:
    """Whether the loss is high and falls in the last quarter of the run as it did in the first."""
    values = loss.values[np.isfinite(loss.values)]
    if len(values) < 4:
        return False
    levels = [float(np.median(quarter)) for quarter in np.array_split(values, 4)]
    falls = -np.diff(levels)
    return bool(loss.left > STEADY_LEFT and falls.min() > 0 and falls[-1] > 0.5 * falls[0])


def _typical(window: Window, moved: Motion) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The median update of each matrix while the learning rate was near its peak."""
    rows = moved.ratios[:, is_at_full_rate(window, moved.steps)]
    known = [row[np.isfinite(row)] for row in rows]
    return np.array([float(np.median(row)) for row in known if len(row)])
