"""The ranks of one job no longer have the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.events import happenings, number
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import listed
from sonde.schema.window import Window

SERIES: Final = "model/weights/fingerprint"
ROUNDING: Final = 1e-9
"""Averaged gradients are bitwise identical on every rank, and so are the weights."""


@rule(
    severity="critical",
    causes=("loss_oscillation", "loss_spikes", "underfitting"),
    references=("Li et al. 2020, PyTorch Distributed: DDP keeps replicas identical",),
)
def rank_desync(window: Window) -> Iterator[Found]:
    """The weights of the ranks have diverged: gradients are not averaged, or a rank skips steps."""
    steps, values = window.get(SERIES)
    first = dict(zip(steps.tolist(), values.tolist(), strict=True))
    apart: dict[int, tuple[int, float, int]] = {}
    for step, details in happenings(window, "fingerprint"):
        rank, other = int(number(details, "rank", -1)), number(details, "value", float("nan"))
        # Ranks of a sharded model are compared with the first rank that holds the same parts.
        own, of = number(details, "reference", first.get(step, float("nan"))), int(number(details, "of", 0))
        if rank >= 0 and rank not in apart and abs(own - other) > ROUNDING * max(abs(own), abs(other), 1e-30):
            apart[rank] = (step, abs(own - other) / max(abs(own), 1e-30), of)
    if not apart:
        return
    rank, (step, gap, of) = min(apart.items(), key=lambda item: item[1][0])
    ranks = f"rank{'' if len(apart) == 1 else 's'} {listed([str(rank) for rank in sorted(apart)])}"
    yield Found(
        f"The weights of {ranks} have differed from those of rank {of} since step {step:,} at the latest.",
        step=step,
        confidence=0.95,
        evidence=[Evidence(SERIES, gap, "0", step, f"relative difference of the weights to rank {rank}")],
        remedy="Wrap the model: `model = DistributedDataParallel(model)`, and call the wrapper, not `model.module`. "
        "Step the optimizer on every rank, and broadcast the weights after loading a checkpoint on one rank.",
    )
