"""The loss jumps far above its recent range several times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import find_spikes, learned
from sonde.diagnose.measures.readings import reading
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

SEVERAL: Final = 2
HUGE: Final = 30.0
"""Height from which a single spike is a warning, if it also exceeds the starting loss WORSE times. Spikes of healthy
runs with small batches stay below both: a loss 3 times its trailing median occurs in 26 % of them."""
WORSE: Final = 3.0
MANY_SMALLER: Final = 4


@rule(
    is_measured=True,
    severity="warning",
    references=(
        "Huang et al. 2025, SPAM: spike-aware Adam",
        "Chowdhery et al. 2022, PaLM: skip the batches around a spike",
        "OLMo et al. 2024, 2 OLMo 2 Furious: spike score",
    ),
)
def loss_spikes(window: Window) -> Iterator[Found]:
    """The loss jumps out of its recent range several times."""
    loss = learned(window)
    if loss is None or not loss.unit > 0:
        return
    spikes = find_spikes(loss, share=0.3)
    if len(spikes) < SEVERAL:
        smaller = find_spikes(loss, share=0.15)
        spikes = smaller if len(smaller) >= MANY_SMALLER else spikes
    if not spikes:
        return
    highest = max(spikes, key=lambda spike: spike.height)
    is_huge = highest.height > HUGE and float(loss.values[highest.index]) > WORSE * loss.unit
    is_serious = len(spikes) >= SEVERAL or is_huge
    named = ", ".join(f"{spike.step:,}" for spike in spikes[:5]) + (", ..." if len(spikes) > 5 else "")
    yield Found(
        f"The loss spiked once, at step {named}, to {number(highest.height)} times its recent level."
        if len(spikes) == 1
        else f"The loss spiked {len(spikes):,} times, at steps {named}; the highest spike was "
        f"{number(highest.height)} times its recent level.",
        step=spikes[0].step,
        last_step=spikes[-1].step,
        severity="warning" if is_serious else "info",
        confidence=0.8 if is_serious else 0.4,
        evidence=[
            reading(window, loss.name, highest.step, f"below {number(highest.level * 3)}", "highest spike"),
            Evidence("number of spikes", float(len(spikes)), "0"),
        ],
        remedy=f"Inspect the {'batch at this step' if len(spikes) == 1 else 'batches at these steps'}. Clip gradients "
        "before `optimizer.step()`: `clip_grad_norm_(model.parameters(), 1.0)`. With Adam, use `betas=(0.9, 0.95)`.",
    )
