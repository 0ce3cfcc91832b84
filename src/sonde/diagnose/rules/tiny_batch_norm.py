"""Batch norm over a handful of samples: its statistics are mostly noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted
from sonde.schema.window import Window

FEW: Final = 4


@rule(severity="info", references=("Wu and He 2018, Group normalization",))
def tiny_batch_norm(window: Window) -> Iterator[Found]:
    """Batches are too small for batch norm."""
    norms = [m for m in structure(window).modules if m.type.startswith("BatchNorm") and m.calls > 0]
    size = seen(window, "data/input/size")
    if not norms or not len(size) or not size.typical < FEW:
        return
    yield Found(
        f"Batch norm ({norms[0].name}) computes its statistics over batches of only "
        f"{counted(round(size.typical), 'sample')}.",
        step=int(size.steps[0]),
        confidence=0.6,
        remedy="Replace it with `nn.GroupNorm` or `nn.LayerNorm`, or use larger batches.",
        sites=tuple(m.name for m in norms),
        evidence=(Evidence("data/input/size", size.typical, "16 or more", meaning="batch size"),),
    )
