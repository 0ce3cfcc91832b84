"""Adapters outweigh the weights they adapt: alpha / r is so large that the first steps overwrite the base model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.model import Adapter, adapters, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, since
from sonde.schema.window import Window

OUTWEIGHED: Final = 2.0
"""rms of base and adapter together, divided by that of the base alone; healthy fine-tuning stays below 1.4."""
LOUD: Final = 16.0
"""alpha / r, or alpha / sqrt(r) for rsLoRA, below which the scale is not to blame. Common values are 0.5 to 8."""
GROWN: Final = 1.0
"""Norm of B A, before scaling, relative to the weight. Generated runs with a large scale stay below 0.15; updates that
are too large take it above 100."""
MIN_SEEN: Final = 10


@rule(
    severity="warning",
    needs=("act/*/rms",),
    causes=(
        "lr_too_high", "loss_oscillation", "loss_spikes", "exploding_gradients", "underfitting", "nan_inf",
        "init_scale", "saturated_activations", "output_logit_growth", "bad_batches",
    ),
    references=("Hu et al. 2021, LoRA", "Kalajdzievski 2023, rsLoRA: alpha / sqrt(r)"),
)  # fmt: skip
def lora_scale_too_large(window: Window) -> Iterator[Found]:
    """The adapters contribute several times as much to the output as the frozen weights."""
    outweighed = {}
    scales = _scales(window)
    for adapter in adapters(window):
        if scales.get(adapter.module, np.inf) < LOUD:
            continue  # then the adapter itself has grown: that is the task's, or the learning rate's, doing
        if seen(window, f"unit/{adapter.b}/adapter_ratio").late > GROWN:
            continue
        ratio = _ratio(window, adapter)
        if ratio is not None and ratio[1] > OUTWEIGHED:
            outweighed[adapter] = ratio
    if not outweighed:
        return
    worst, (step, level) = max(outweighed.items(), key=lambda item: item[1][1])
    yield Found(
        f"The adapter of {worst.module} has outweighed its frozen weight {since(step)}: their sum is {number(level)} "
        f"times the output of {worst.base_module} alone.",
        step=step,
        confidence=0.85,
        sites=[adapter.module for adapter in outweighed],
        evidence=[
            Evidence(f"act/{worst.module}/rms", level, "1 to 1.4", step, f"output / that of {worst.base_module}")
        ],
        remedy=f"Use an alpha / r of 1 to 2: with r = {worst.rank}, set `lora_alpha` to {worst.rank} to "
        f"{2 * worst.rank}. Or set `use_rslora=True`, which scales by `alpha / sqrt(r)`. If that is already the case, "
        "lower the learning rate.",
    )


def _scales(window: Window) -> dict[str, float]:
    """The largest scale of each module that has adapters, where the module knows it."""
    return {
        module.name: max(map(float, scaling.values()))
        for module in structure(window).modules
        if isinstance(scaling := module.detail.get("scaling"), Mapping) and scaling
    }


def _ratio(window: Window, adapter: Adapter) -> tuple[int, float] | None:
    """(first step, median) of adapted / base output. The median skips the first half: adapters start at zero."""
    steps, both = window.get(f"act/{adapter.module}/rms")
    base_steps, base = window.get(f"act/{adapter.base_module}/rms")
    # Modules may be recorded in turn: compare each value with the base's newest one.
    newest = np.searchsorted(base_steps, steps, side="right") - 1
    steps, both, newest = steps[newest >= 0], both[newest >= 0], newest[newest >= 0]
    if adapter.module == adapter.base_module or len(both) < MIN_SEEN:
        return None
    base = base[newest]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = both / base
    known = np.isfinite(ratio)
    if known.sum() < MIN_SEEN:
        return None
    steps, ratio = steps[known], ratio[known]
    return onset(steps, ratio > OUTWEIGHED), float(np.median(ratio[len(ratio) // 2 :]))
