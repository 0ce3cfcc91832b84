"""The loss jumps far above its recent range, again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import find_spikes, learned
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

SEVERAL: Final = 2
MANY_SMALLER: Final = 4


@rule(
    is_measured=True,
    severity="warning",
    references=(
        "Huang et al. 2025, SPAM: spike-aware Adam",
        "Chowdhery et al. 2022, PaLM: skip the batches round a spike",
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
    named = ", ".join(str(spike.step) for spike in spikes[:5]) + (", ..." if len(spikes) > 5 else "")
    yield Found(
        f"the loss spiked {len(spikes)} time{'s'[: len(spikes) > 1]}, at step{'s'[: len(spikes) > 1]} {named}; the "
        f"highest was {highest.height:.0f} times its recent level",
        step=spikes[0].step,
        last_step=spikes[-1].step,
        severity="warning" if len(spikes) >= SEVERAL else "info",
        confidence=0.8 if len(spikes) >= SEVERAL else 0.4,
        evidence=[
            Evidence(
                loss.name, highest.height, "below 3", highest.step, "value over the median of the 20 steps before"
            ),
            Evidence(loss.name, float(len(spikes)), "0", None, "number of spikes"),
        ],
        remedy="look at the batches of these steps; clip_grad_norm_(model.parameters(), 1.0) before optimizer.step(); "
        "with Adam, betas=(0.9, 0.95).",
    )
