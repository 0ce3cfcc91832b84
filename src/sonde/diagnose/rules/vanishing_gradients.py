"""The layers near the input get next to no gradient, compared with those near the output or with the loss itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax, nanmedian, onset
from sonde.diagnose.measures.depth import NEEDS, Depth, depth
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.signal import fading
from sonde.diagnose.rule import Found, rule
from sonde.schema.sketch import Array
from sonde.schema.window import Window

FADED: Final = 1e-3
"""Pull of the front over that of the back: 0.2 to 3 in healthy runs (5 % and 95 %), below 1e-3 in none."""
WEAK: Final = 1e-3
"""And a front that could move the loss by less than this share."""
STUCK: Final = 0.7
"""Share of the loss that was left meanwhile; a net that learns all the same has no fault."""
LASTING: Final = 0.5
"""Share of the run. Some nets get going in the end."""
MIN_STEPS: Final = 20


@rule(
    is_measured=True,
    severity="warning",
    needs=(*NEEDS, "act/*/rms"),
    causes=("underfitting", "lr_too_low", "rank_collapse", "bottleneck_layer", "adam_epsilon_dominates"),
    references=("Hochreiter 1991", "Glorot & Bengio 2010", "AUTOTRAINER, Zhang et al. 2021"),
)
def vanishing_gradients(window: Window) -> Iterator[Found]:
    """Layers near the input get next to no gradient and do not learn."""
    profile, loss = depth(window), learned(window)
    if profile is None or loss is None or len(profile.sites) < 3 or len(profile.steps) < MIN_STEPS:
        return
    with np.errstate(all="ignore"):
        ratio = profile.front / profile.back
    faded = (ratio < FADED) & (profile.front < WEAK) & (_is_true_decay(profile))
    gone = (nanmax(profile.pull, axis=0) < WEAK) & (profile.grad > 0).any(axis=0) & (fading(window) < FADED)
    bad = faded | gone
    # What comes late has another cause: weights that decayed, units that died.
    if bad.mean() < LASTING or onset(profile.steps, bad) > 0.3 * window.last_step:
        return
    if not _level(loss, profile.steps[bad]) > STUCK:
        return
    yield _finding(window, profile, bad, ratio, is_everywhere=bool(gone.mean() > faded.mean()))


def _level(loss: Learned, steps: NDArray[np.int64]) -> float:
    """Share of the loss that was left at these steps."""
    values = loss.values[np.isin(loss.steps, steps)]
    values = values[np.isfinite(values)]
    return float(np.median(values)) / loss.unit if len(values) else float("nan")


def _is_true_decay(profile: Depth) -> NDArray[np.bool_]:
    """Exact zeros come from dead or unconnected layers; where gradients fade, those further on are tiny, too."""
    positive = np.where(profile.pull > 0, profile.pull, np.nan)
    with np.errstate(all="ignore"):
        weakest = np.nanmin(positive, axis=0, initial=np.inf)
        return np.asarray((profile.front > 0) | (weakest < 0.1 * FADED * profile.back))


def _finding(window: Window, profile: Depth, bad: Array, ratio: Array, *, is_everywhere: bool) -> Found:
    step = onset(profile.steps, bad.astype(bool))
    front, share = map(float, nanmedian(np.stack([profile.front, ratio], axis=1), axis=0))
    weak = [site for site, pull in zip(profile.sites, nanmedian(profile.pull, axis=1), strict=True) if pull < WEAK]
    first, last = profile.sites[0], profile.sites[-1]
    if is_everywhere:
        message = (
            f"no weight of the {len(profile.sites)} layers from {first} to {last} has had a gradient to speak of "
            f"since step {step}: the signal dies on its way through them"
        )
    else:
        message = (
            f"gradients vanish on their way back: since step {step} {first} pulls at the loss {share:.0e} times as "
            f"strongly as {last}, and {len(weak)} of {len(profile.sites)} layers hardly learn"
        )
    return Found(
        message,
        step=step,
        confidence=0.85,
        sites=weak[:12] or [first],
        evidence=[
            Evidence(f"grad/{first}/norm_preclip", share, "0.2 to 3", step, "pull of the first layers over the last"),
            Evidence(
                f"grad/{first}/norm_preclip", front, "0.01 to 100", step, "|gradient| |weight| / loss, first layers"
            ),
        ],
        remedy=_remedy(window),
    )


def _remedy(window: Window) -> str:
    types = {module.type for module in structure(window).modules if module.kind == "activation"}
    bounded = sorted(types & {"Sigmoid", "Tanh", "Softsign", "Hardsigmoid", "LogSigmoid"})
    start = (
        f"Use nn.ReLU() or nn.GELU() in place of nn.{bounded[0]}()" if bounded else "Give the layers skip connections"
    )
    gain = "nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')"
    return f"{start}, initialise with {gain}, and put a norm layer or a skip connection into each block."
