"""Adapters of rank one or two use their full rank while the loss has stopped improving at a high level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import adapters
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent
from sonde.schema.window import Window

SMALL: Final = 2
"""Highest rank in question; a rank of four or more rarely limits fine-tuning."""
FULL: Final = 0.6
"""Stable rank of B A divided by r; a rank that is more than enough is used unevenly."""
LEFT: Final = 0.15
"""Final loss as a fraction of its starting value."""
FLAT: Final = 0.15
"""Maximum relative fall over the last two fifths of a loss that has stopped improving."""
GREW: Final = 0.05
"""Norm of B A relative to the weight; below it, the adapter is not in use."""
MIN_STEPS: Final = 100


@rule(
    severity="warning",
    causes=("underfitting",),
    references=("Biderman et al. 2024, LoRA learns less", "Hu et al. 2021, LoRA"),
)
def lora_rank_too_low(window: Window) -> Iterator[Found]:
    """The rank of the adapters limits what the model can learn."""
    state, known = learned(window), adapters(window)
    if state is None or not known or not all(adapter.rank <= SMALL for adapter in known):
        return
    if len(state.values) < MIN_STEPS or not LEFT < state.end / state.first < 1 or not _is_flat(state):
        return
    used = [seen(window, f"unit/{adapter.b}/row_rank").late / adapter.rank for adapter in known]
    grown = [seen(window, f"unit/{adapter.b}/adapter_ratio").late for adapter in known]
    if not np.median(used) > FULL or not np.median(grown) > GREW:
        return
    rank, since = known[0].rank, int(state.steps[int(0.6 * len(state.steps))])
    users = "the adapter uses its" if len(known) == 1 else f"all {len(known)} adapters use their"
    yield Found(
        f"The loss stopped improving at about step {since:,} ({percent(state.end / state.first)} of its starting "
        f"value), while {users} full rank of {rank}.",
        step=since,
        confidence=0.65,
        sites=[adapter.b for adapter in known],
        evidence=[
            Evidence(
                f"unit/{known[0].b}/row_rank",
                float(np.median(used)),
                "well below 1",
                meaning="fraction of the rank in use",
            ),
            Evidence(
                state.name, state.end / state.first, "below 0.15", meaning="final loss relative to its starting value"
            ),
        ],
        remedy=f"Raise the rank: `r={8 if rank == 1 else 16}` (now {rank}), with "
        f"`lora_alpha={16 if rank == 1 else 32}`. The weights allow a rank of up to {known[0].width:,}.",
    )


def _is_flat(state: Learned) -> bool:
    """Whether the loss in the last fifth of the run is hardly below that in the fifth before."""
    fifth = max(5, len(state.values) // 5)
    before, last = np.median(state.values[-2 * fifth : -fifth]), np.median(state.values[-fifth:])
    return bool(np.isfinite(last) and last > (1 - FLAT) * before)
