"""Adam's eps is larger than the gradients: its steps become plain gradient descent with a tiny learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax, nanmedian
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Parameter, Structure, structure
from sonde.diagnose.measures.rate import one_digit
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, number, times
from sonde.schema.window import Window

SMALL: Final = 1.0
"""Root of the mean second moment, divided by eps."""
MOST: Final = 0.5
UNLEARNED: Final = 0.5


@rule(
    severity="warning",
    needs=("optim/*.exp_avg_sq/abs_mean",),
    causes=("lr_too_low", "underfitting", "loss_plateau", "constant_output", "rnn_vanishing_temporal"),
    references=(
        "Wortsman et al. 2023, Small-scale proxies for large-scale transformer training instabilities",
        "OLMo et al. 2024, 2 OLMo 2 Furious: eps 1e-5 to 1e-8",
    ),
)
def adam_epsilon_dominates(window: Window) -> Iterator[Found]:
    """Adam's eps is larger than the root of the second moment, so updates shrink with the gradients."""
    known = structure(window)
    loss = learned(window)
    ratios = {
        p.name: ratio for p in known.parameters if p.trainable and (ratio := _ratio(window, known, p)) is not None
    }
    if loss is None or not ratios:
        return
    small = [name for name, ratio in ratios.items() if ratio < SMALL]
    if len(small) < MOST * len(ratios):
        return
    typical = float(np.median(list(ratios.values())))
    eps = next(known.group_of(p)["eps"] for p in known.parameters if p.name == small[0])
    is_harmful = loss.left > UNLEARNED
    yield Found(
        f"Adam's eps ({number(eps)}) is larger than the gradients of {len(small)} of "
        f"{counted(len(ratios), 'parameter')}: the root of the second moment is only {times(typical)} eps"
        f"{f', and {loss.outcome}' if is_harmful else ''}.",
        step=int(loss.steps[0]),
        confidence=0.9 if is_harmful else 0.5,
        severity="warning" if is_harmful else "info",
        sites=small[:3],
        evidence=[
            Evidence(f"optim/{small[0]}.exp_avg_sq/abs_mean", typical, "above 10", None, "sqrt(v) / eps, median"),
            loss.left_evidence(),
        ],
        remedy=f"Lower eps: `{known.optimizer_type}(..., eps={one_digit(min(1e-8, typical * eps / 1000))})` "
        f"(now {number(eps, 3)}).",
    )


def _ratio(window: Window, known: Structure, parameter: Parameter) -> float | None:
    """Median over the first half of the run of sqrt(mean(v) / (1 - beta2**t)) / eps."""
    steps, mean = window.get(f"optim/{parameter.name}.exp_avg_sq/abs_mean")
    group = known.group_of(parameter)
    eps, betas = group.get("eps"), group.get("betas") or (0.9, 0.999)
    if len(mean) < 10 or not isinstance(eps, float) or not eps > 0 or not nanmax(mean) > 0:
        return None  # Adafactor has two eps, which it adds elsewhere
    # Late in a run, gradients may be small because everything is learned.
    half = slice(0, max(5, len(mean) // 2))
    corrected = mean[half] / (1.0 - float(betas[1]) ** (steps[half] - steps[0] + 1.0))
    return float(nanmedian(np.sqrt(corrected)) / eps)
