"""Values in float16 that come near the largest number it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

LARGEST: Final = {"float16": 65504.0, "bfloat16": 3.39e38}
NEAR: Final = 0.1
"""Share of the largest number: one more layer, or one more doubling, and it is infinite."""


@rule(
    severity="warning",
    needs=("act/*/max_abs", "act/*/inf_fraction"),
    causes=("nan_inf", "loss_spikes"),
    references=("Micikevicius et al. 2018, Mixed Precision Training", "Kalamkar et al. 2019, BFLOAT16"),
)
def low_precision_overflow(window: Window) -> Iterator[Found]:
    """Activations come near, or pass, the largest number of their type."""
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
        f"outputs of {worst} have come within a factor of {max(1.0, 1 / share):.2g} of the largest {dtype} "
        f"since step {step}",
        step=step,
        confidence=0.8,
        sites=sorted(near, key=lambda site: -near[site][0])[:12],
        evidence=[Evidence(f"act/{worst}/max_abs", share, "below 0.01", step, f"share of the largest {dtype}")],
        remedy="Train in bfloat16, or keep this layer in float32: with torch.autocast('cuda', enabled=False): ...",
    )
