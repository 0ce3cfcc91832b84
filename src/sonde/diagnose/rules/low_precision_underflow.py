"""Gradients in float16 lose digits or are rounded to zero because the loss is not scaled up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, percent, since
from sonde.schema.window import Window

LOST: Final = 0.5
"""Fraction of a gradient's non-zero elements below 2**-14, where float16 loses digits."""
SCALED: Final = 0.02
"""Fraction of elements below 2**-24, which float16 cannot represent: gradients were scaled and unscaled."""
MIN_SEEN: Final = 5
MOST_ZERO: Final = 0.8
"""Fraction of the parameters; a dead branch or an unused head has zeros too."""


@rule(
    severity="warning",
    needs=("grad/*/below_fp16_normal", "grad/*/fp16_underflow_fraction", "grad/*/zero_fraction"),
    causes=("vanishing_gradients", "underfitting", "lr_too_low", "frozen_layers", "lr_not_applied", "constant_output"),
    references=("Micikevicius et al. 2018, Mixed Precision Training",),
)
def low_precision_underflow(window: Window) -> Iterator[Found]:
    """Gradients are too small for float16."""
    dtypes: Any = window.facts.get("dtypes") or {}
    zero = _all_zero(window, dtypes)
    if zero:
        yield _vanished(zero, len(window.names("grad/*/zero_fraction")))
        return
    lost: dict[str, float] = {}
    first = 0
    for site, steps, values in window.by_site("grad/*/below_fp16_normal"):
        known = values[np.isfinite(values)]
        beyond = window.get(f"grad/{site}/fp16_underflow_fraction")[1]
        if dtypes.get(f"grad/{site}") != "float16" or len(known) < MIN_SEEN:
            continue
        if np.median(known) > LOST and not nanmedian(beyond) > SCALED:
            lost[site], first = float(np.median(known)), int(steps[0])
    if len(lost) < 2:
        return
    worst = max(lost, key=lambda site: lost[site])
    more = counted(len(lost) - 1, "more parameter")
    others = f", as does most of the gradient of {more}" if len(lost) > 1 else ""
    yield Found(
        f"Gradients have been too small for float16 {since(first)}: {percent(lost[worst])} of the gradient of {worst} "
        f"loses digits or becomes zero{others}.",
        step=first,
        confidence=0.8,
        sites=sorted(lost, key=lambda site: -lost[site])[:12],
        evidence=[Evidence(f"grad/{worst}/below_fp16_normal", lost[worst], "below 0.1", first, "fraction too small")],
        remedy="Scale the loss: `scaler = torch.amp.GradScaler(); scaler.scale(loss).backward()`. "
        "Or train in bfloat16.",
    )


def _all_zero(window: Window, dtypes: Any) -> dict[str, int]:
    """Gradients that are exactly zero, all of them, if activations or gradients are float16: site -> first step."""
    if not any(dtype == "float16" for name, dtype in dtypes.items() if name.startswith(("act/", "grad/"))):
        return {}
    found = {}
    for site, steps, values in window.by_site("grad/*/zero_fraction"):
        known = values[np.isfinite(values)]
        if len(known) >= MIN_SEEN and known[0] == 1.0 and np.median(known) == 1.0:  # zero later: nothing left to learn
            found[site] = int(steps[0])
    num = len(window.names("grad/*/zero_fraction"))
    return found if num and len(found) > MOST_ZERO * num else {}


def _vanished(zero: dict[str, int], num: int) -> Found:
    first = min(zero.values())
    site = next(iter(zero))
    return Found(
        f"The gradients of {len(zero)} of {counted(num, 'parameter')} have been exactly zero {since(first)}: they are "
        "too small for float16.",
        step=first,
        confidence=0.9,
        severity="critical",
        sites=list(zero)[:12],
        evidence=[Evidence(f"grad/{site}/zero_fraction", 1.0, "below 1", first, "fraction of zeros in the gradient")],
        remedy="Scale the loss: `scaler = torch.amp.GradScaler(); scaler.scale(loss).backward()`. "
        "Or train in bfloat16.",
    )
