"""Adapters of rank one or two that are used to the full while the loss stands still far from where it could be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import adapters
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

SMALL: Final = 2
"""Ranks in question. From four on fine-tuning is rarely held back by the rank."""
FULL: Final = 0.6
"""Stable rank of B A over r: a rank that is more than enough is used unevenly."""
LEFT: Final = 0.15
"""Share of the loss that is still there."""
STANDS: Final = 0.15
"""What the loss may still fall over the last two fifths to count as standing still."""
GREW: Final = 0.05
"""Norm of B A over that of the weight: less than this and the adapter has not been put to use."""
MIN_STEPS: Final = 100


@rule(
    severity="warning",
    causes=("underfitting",),
    references=("Biderman et al. 2024, LoRA learns less", "Hu et al. 2021, LoRA"),
)
def lora_rank_too_low(window: Window) -> Iterator[Found]:
    """The rank of the adapters bounds what can be learnt."""
    state, known = learned(window), adapters(window)
    if state is None or not known or not all(adapter.rank <= SMALL for adapter in known):
        return
    if len(state.values) < MIN_STEPS or not LEFT < state.end / state.first < 1 or not _stands(state):
        return
    used = [seen(window, f"unit/{adapter.b}/row_rank").late / adapter.rank for adapter in known]
    grown = [seen(window, f"unit/{adapter.b}/adapter_ratio").late for adapter in known]
    if not np.median(used) > FULL or not np.median(grown) > GREW:
        return
    rank, since = known[0].rank, int(state.steps[int(0.6 * len(state.steps))])
    yield Found(
        f"the loss has stood still since about step {since} with {state.end / state.first:.0%} of it left, while all "
        f"{len(known)} adapters use their rank of {rank} to the full",
        step=since,
        confidence=0.65,
        sites=[adapter.b for adapter in known],
        evidence=[
            Evidence(
                f"unit/{known[0].b}/row_rank",
                float(np.median(used)),
                "well below 1",
                meaning="share of the rank in use",
            ),
            Evidence(state.name, state.end / state.first, "below 0.15", meaning="share of the loss that is left"),
        ],
        remedy=f"r = {8 if rank == 1 else 16} (now {rank}) with lora_alpha = {16 if rank == 1 else 32}; the weights "
        f"are {known[0].width} wide",
    )


def _stands(state: Learned) -> bool:
    """Whether the last fifth is hardly below the one before it."""
    fifth = max(5, len(state.values) // 5)
    before, last = np.median(state.values[-2 * fifth : -fifth]), np.median(state.values[-fifth:])
    return bool(np.isfinite(last) and last > (1 - STANDS) * before)
