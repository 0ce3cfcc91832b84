"""Neither training nor validation gets far below guessing, although the updates look healthy. The last resort."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmean, nanstd
from sonde.diagnose.measures.data import MIN_SEEN, seen
from sonde.diagnose.measures.loss import Learned, held_out, learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

POOR: Final = 0.75
"""Share of the loss of guessing that is still there. Noise can leave half of it in a healthy run."""
POOR_AND_SMALL: Final = 0.6
"""The same where the model is visibly small: no hidden layer, or one narrower than the classes are many."""
MIN_STEPS: Final = 60
STILL_FALLING: Final = 0.03
"""Share of guessing that the last quarter gained over the one before: such a run is not over."""


@rule(is_measured=True, references=("Ben Braiek and Khomh 2022, TheDeepChecker: fit of a single batch",))
def underfitting(window: Window) -> Iterator[Found]:
    """After the whole run the model is hardly better than a constant answer."""
    state = learned(window)
    if state is None or len(state.values) < MIN_STEPS or len(seen(window, "data/loss/baseline")) < MIN_SEEN:
        return
    if state.has_diverged or not np.isfinite(state.guessing) or not state.guessing > 0:
        return
    left, best = state.end / state.guessing, state.best / state.guessing
    held = held_out(window)
    if _gained(state) > STILL_FALLING:
        return
    enough = POOR_AND_SMALL if _is_small(window) else POOR
    if not left > enough or not best > 0.7 * enough or (held is not None and held.best / held.guessing < 0.7 * enough):
        return
    yield Found(
        f"after {len(state.values)} steps the loss is still {left:.0%} of what a constant answer would give",
        step=int(state.steps[0]),
        confidence=0.5,
        remedy="try to fit a single batch: if that works, train longer or with a higher learning rate; if not, the "
        f"model is too small or too plain ({_size(window)})",
        evidence=(
            Evidence(state.name, state.end, f"well below {state.guessing:.3g}"),
            Evidence("data/loss/baseline", state.guessing, "", meaning="loss of a constant answer"),
        ),
    )


def _gained(state: Learned) -> float:
    """What the last quarter gained, as far as the noise of batches lets one say."""
    quarter = len(state.values) // 4
    before, after = state.values[-2 * quarter : -quarter], state.values[-quarter:]
    noise = 2 * float(nanstd(after) / np.sqrt(quarter))
    return (float(nanmean(before) - nanmean(after)) - noise) / state.guessing


def _is_small(window: Window) -> bool:
    matrices = structure(window).matrices
    num_classes = seen(window, "data/output/width").typical
    if matrices and matrices[0].shape[-1] == matrices[-1].shape[0]:
        return False  # an autoencoder is narrow on purpose
    return len(matrices) == 1 or any(p.shape[0] < num_classes - 1 for p in matrices[:-1])


def _size(window: Window) -> str:
    matrices = structure(window).matrices
    return (
        f"{len(matrices)} weight matrices, the narrowest {min(p.shape[0] for p in matrices)} wide" if matrices else ""
    )
