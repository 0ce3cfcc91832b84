"""Adapters that drown what they adapt: alpha / r is so large that the first steps overwrite the base model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.model import Adapter, adapters
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

DROWNED: Final = 2.0
"""rms of base and adapter together over that of the base alone; healthy fine-tuning stays below 1.4."""
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
    """The adapters' part of the output is several times that of the frozen weights."""
    drowned = {}
    for adapter in adapters(window):
        ratio = _ratio(window, adapter)
        if ratio is not None and ratio[1] > DROWNED:
            drowned[adapter] = ratio
    if not drowned:
        return
    worst, (step, level) = max(drowned.items(), key=lambda item: item[1][1])
    yield Found(
        f"the adapter of {worst.module} has drowned its frozen weight since step {step}: the sum is {level:.2g} times "
        f"what {worst.base_module} alone gives",
        step=step,
        confidence=0.85,
        sites=[adapter.module for adapter in drowned],
        evidence=[Evidence(f"act/{worst.module}/rms", level, "1 to 1.4", step, f"over that of {worst.base_module}")],
        remedy=f"alpha / r of 1 to 2: with r = {worst.rank}, lora_alpha = {worst.rank} to {2 * worst.rank} "
        "(or use_rslora=True, alpha / sqrt(r)); where that is so already, a lower learning rate",
    )


def _ratio(window: Window, adapter: Adapter) -> tuple[int, float] | None:
    """(since when, median) of adapted over base output, the first half left out: an adapter begins at nothing."""
    steps, both = window.get(f"act/{adapter.module}/rms")
    base_steps, base = window.get(f"act/{adapter.base_module}/rms")
    if adapter.module == adapter.base_module or len(both) < MIN_SEEN or not np.array_equal(steps, base_steps):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = both / base
    known = np.isfinite(ratio)
    if known.sum() < MIN_SEEN:
        return None
    steps, ratio = steps[known], ratio[known]
    return onset(steps, ratio > DROWNED), float(np.median(ratio[len(ratio) // 2 :]))
