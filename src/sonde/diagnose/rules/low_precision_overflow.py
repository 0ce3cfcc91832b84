"""Activations come close to the largest value of their low-precision type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, since
from sonde.schema.window import Window

LARGEST: Final = {"float16": 65504.0, "bfloat16": 3.39e38}
NEAR: Final = 0.1
"""Fraction of the largest value: with a little more growth, values become infinite."""


@rule(
    severity="warning",
    needs=("act/*/max_abs", "act/*/inf_fraction"),
    causes=("nan_inf", "loss_spikes"),
    references=("Micikevicius et al. 2018, Mixed Precision Training", "Kalamkar et al. 2019, BFLOAT16"),
)
def low_precision_overflow(window: Window) -> Iterator[Found]:
    """Activations come close to, or exceed, the largest value of their type."""
    dtypes: Any = window.facts.get("dtypes") or {}
    near: dict[str, tuple[float, int]] = {}
    for site, steps, values in window.by_site("act/*/max_abs"):
        limit = LARGEST.get(dtypes.get(f"act/{site}", ""))
        if limit is None:
            continue
        bad = np.isfinite(values) & (values > NEAR * limit)
        if bad.sum() >= 3:
            near[site] = float(nanmax(values)) / limit, int(steps[bad.argmax()])
    if not near:
        return
    worst = max(near, key=lambda site: near[site][0])
    share, step = near[worst]
    dtype = dtypes[f"act/{worst}"]
    yield Found(
        f"The outputs of {worst} have been within a factor of {number(max(1.0, 1 / share))} of the largest {dtype} "
        f"value {since(step)}.",
        step=step,
        confidence=0.8,
        sites=sorted(near, key=lambda site: -near[site][0])[:12],
        evidence=[
            Evidence(f"act/{worst}/max_abs", share, "below 0.01", step, f"fraction of the largest {dtype} value")
        ],
        remedy="Train in bfloat16, or keep this layer in float32: `with torch.autocast('cuda', enabled=False): ...`.",
    )
