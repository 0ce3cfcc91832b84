"""Neither training nor validation is much better than a constant prediction, although updates look healthy.

Reported when no other rule explains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_regression, seen
from sonde.diagnose.measures.loss import held_out, learned
from sonde.diagnose.measures.model import adapters, structure
from sonde.diagnose.measures.outlook import is_improving
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, number, percent
from sonde.schema.window import Window

POOR: Final = 0.75
"""Final loss relative to a constant prediction. In a healthy run, noise can leave half of it."""
POOR_AND_SMALL: Final = 0.6
"""The same for a small model: no hidden layer, or one that is narrower than its outputs need to vary independently."""
UNLEARNED: Final = 0.97
"""The same for a model whose outputs have the shape of its inputs: an autoencoder cannot reproduce noise, and a
denoiser cannot predict it, so most of the loss may remain."""
MIN_STEPS: Final = 60


@rule(is_measured=True, references=("Ben Braiek and Khomh 2022, TheDeepChecker: fit of a single batch",))
def underfitting(window: Window) -> Iterator[Found]:
    """After the whole run, the model is hardly better than a constant prediction."""
    state = learned(window)
    if state is None or len(state.values) < MIN_STEPS or len(seen(window, "data/loss/baseline")) < MIN_SEEN:
        return
    if state.has_diverged or not np.isfinite(state.guessing) or not state.guessing > 0:
        return
    left, best = state.end / state.guessing, state.best / state.guessing
    held = held_out(window)
    if is_improving(state):
        return
    enough = _enough(window)
    if not left > enough or not best > 0.7 * enough or (held is not None and held.best / held.guessing < 0.7 * enough):
        return
    size = _size(window)
    yield Found(
        f"After {len(state.values):,} steps the model is no better than always predicting a constant "
        f"(its loss is {percent(left)} of a constant prediction's)."
        if left > 0.97
        else f"After {len(state.values):,} steps the loss is still {percent(left)} of a constant prediction's.",
        step=int(state.steps[0]),
        confidence=0.5,
        remedy="Try to fit a single batch. If that works, train longer or with a higher learning rate; if not, the "
        f"model is too small or too simple{f' ({size})' if size else ''}.",
        evidence=(
            Evidence(state.name, state.end, f"well below {number(state.guessing, 3)}", meaning="final loss"),
            Evidence("data/loss/baseline", state.guessing, "", meaning="loss of a constant prediction"),
        ),
    )


def _enough(window: Window) -> float:
    """The loss, relative to a constant prediction's, that such a model should reach. Adapters are narrow by design,
    and add to weights that are not."""
    known = structure(window)
    if _reconstructs(window):
        return UNLEARNED
    if adapters(window) or any(p.is_lora for p in known.parameters):
        return POOR
    # The probabilities of classes add up to one, so they have one degree of freedom less.
    needed = seen(window, "data/output/width").typical - (not is_regression(window))
    is_small = len(known.matrices) == 1 or any(p.shape[0] < needed for p in known.matrices[:-1])
    return POOR_AND_SMALL if is_small else POOR


def _reconstructs(window: Window) -> bool:
    """Whether a regression has outputs as wide as its inputs. Parameters are in the order of the first forward pass."""
    matrices = structure(window).matrices
    return len(matrices) > 1 and is_regression(window) and matrices[0].shape[1] == matrices[-1].shape[0]


def _size(window: Window) -> str:
    matrices = structure(window).matrices
    if not matrices:
        return ""
    narrowest = counted(min(p.shape[0] for p in matrices), "unit")
    return f"{counted(len(matrices), 'weight matrix', 'weight matrices')}, the narrowest with {narrowest}"
