"""Layers near the input get almost no gradient, compared with those near the output or with the loss itself."""

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
from sonde.diagnose.wording import percent, since
from sonde.schema.sketch import Array
from sonde.schema.window import Window

FADED: Final = 1e-3
"""Pull of the front divided by that of the back: 0.2 to 3 in healthy runs (5th to 95th percentile), always > 1e-3."""
WEAK: Final = 1e-3
"""Pull of the front below which it cannot move the loss."""
FAINT: Final = 0.02
"""The same ratio, and WEAKISH for the front, if the signal fades on its way forward, too."""
WEAKISH: Final = 1e-2
STUCK: Final = 0.7
"""Loss as a fraction of its start meanwhile; a network that learns anyway has no fault."""
LASTING: Final = 0.5
"""Minimum fraction of the run; some networks start to learn late."""
MIN_STEPS: Final = 20


@rule(
    is_measured=True,
    severity="warning",
    needs=(*NEEDS, "act/*/rms"),
    causes=("underfitting", "lr_too_low", "rank_collapse", "bottleneck_layer", "adam_epsilon_dominates"),
    references=("Hochreiter 1991", "Glorot & Bengio 2010", "AUTOTRAINER, Zhang et al. 2021"),
)
def vanishing_gradients(window: Window) -> Iterator[Found]:
    """Layers near the input get almost no gradient and do not learn."""
    profile, loss = depth(window), learned(window)
    if profile is None or loss is None or len(profile.sites) < 3 or len(profile.steps) < MIN_STEPS:
        return
    with np.errstate(all="ignore"):
        ratio = profile.front / profile.back
    faded = (ratio < FADED) & (profile.front < WEAK) & (_is_true_decay(profile))
    gone = (nanmax(profile.pull, axis=0) < WEAK) & (profile.grad > 0).any(axis=0) & (fading(window) < FADED)
    # Where hardly any signal arrives, a layer's gradient is that of its biases.
    faint = (ratio < FAINT) & (profile.front < WEAKISH) & (fading(window) < FADED) & _is_true_decay(profile)
    bad = faded | gone | faint
    # Gradients that vanish late have another cause: decayed weights, dead units.
    if bad.mean() < LASTING or onset(profile.steps, bad) > 0.3 * window.last_step:
        return
    if not _level(loss, profile.steps[bad]) > STUCK or loss.left < STUCK:
        return
    yield _finding(window, profile, bad, ratio, is_everywhere=bool(gone.mean() > faded.mean()))


def _level(loss: Learned, steps: NDArray[np.int64]) -> float:
    """The loss at these steps as a fraction of its start."""
    values = loss.values[np.isin(loss.steps, steps)]
    values = values[np.isfinite(values)]
    return float(np.median(values)) / loss.unit if len(values) else float("nan")


def _is_true_decay(profile: Depth) -> NDArray[np.bool_]:
    """Whether gradients really fade. Exact zeros come from dead or unconnected layers; fading ones are tiny instead."""
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
            f"None of the {len(profile.sites)} layers from {first} to {last} has had a significant gradient "
            f"{since(step)}: the signal dies out on its way through them."
        )
    else:
        message = (
            f"Gradients have been vanishing {since(step)}: {first} has only {percent(share)} of the effect of "
            f"{last} on the loss, and {len(weak)} of {len(profile.sites)} layers "
            f"{'hardly learns' if len(weak) == 1 else 'hardly learn'}."
        )
    return Found(
        message,
        step=step,
        confidence=0.85,
        sites=weak[:12] or [first],
        evidence=[
            Evidence(f"grad/{first}/norm_preclip", share, "0.2 to 3", step, "effect of the first layers / the last"),
            Evidence(
                f"grad/{first}/norm_preclip", front, "0.01 to 100", step, "|gradient| |weight| / loss, first layers"
            ),
        ],
        remedy=_remedy(window),
    )


def _remedy(window: Window) -> str:
    types = {module.type for module in structure(window).modules if module.kind == "activation"}
    bounded = sorted(types & {"Sigmoid", "Tanh", "Softsign", "Hardsigmoid", "LogSigmoid"})
    start = f"Use `nn.ReLU()` or `nn.GELU()` instead of `nn.{bounded[0]}()`" if bounded else "Add skip connections"
    init = "`nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')`"
    norm = "a norm layer or a skip connection" if bounded else "a norm layer"
    return f"{start}, initialise with {init}, and add {norm} to each block."
