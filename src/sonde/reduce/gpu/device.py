"""Partial sums on any accelerator with plain torch operations: float64, masked, and never waiting for the device.

Correct everywhere but not fast: a fused kernel can replace `device_rows` with the same signature.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sonde.reduce.cpu.plan import Plan
from sonde.reduce.cpu.rows import Block
from sonde.schema.sketch import (
    HIST_N,
    INF,
    MAX,
    MIN,
    NAN,
    NUM_FIELDS,
    SUM,
    SUMABS,
    SUMSQ,
    ZERO,
    N,
)

_SUMMED = [NAN, INF, ZERO, SUM, SUMSQ, SUMABS]


def device_rows(plan: Plan, blocks: Iterable[Block]) -> Tensor:
    """(T, NUM_FIELDS) on the plan's device, in the plan's order."""
    # MPS has no float64.
    dtype = torch.float32 if plan.device.type == "mps" else torch.float64
    sums = torch.zeros((plan.num_rows, len(_SUMMED)), dtype=dtype, device=plan.device)
    extremes = torch.empty((2, plan.num_rows), dtype=dtype, device=plan.device)
    for block in blocks:
        rows = slice(block.first_row, block.first_row + block.values.shape[0])
        _reduce(block, sums[rows], extremes[:, rows])
    return _table(plan, sums, extremes)


def _reduce(block: Block, sums: Tensor, extremes: Tensor) -> None:
    """Partials of one block. The padding zeros after a tail only affect the count of zeros, which is computed last."""
    values = block.values
    finite = values.isfinite()
    nan = values.isnan()
    kept = torch.where(finite, values, 0).to(sums.dtype)
    sums[:, 0] = nan.sum(1)
    sums[:, 1] = (~finite & ~nan).sum(1)
    sums[:, 2] = (kept != 0).sum(1)
    sums[:, 3] = kept.sum(1)
    sums[:, 4] = (kept * kept).sum(1)
    sums[:, 5] = kept.abs().sum(1)
    if block.tails is not None:
        finite[block.tails.rows] &= block.tails.filled
    extremes[0] = torch.where(finite, kept, torch.inf).amin(1)
    extremes[1] = torch.where(finite, kept, -torch.inf).amax(1)


def _table(plan: Plan, partial: Tensor, extremes: Tensor) -> Tensor:
    offsets, numels = plan.on_device(partial.dtype)
    sums = torch.segment_reduce(partial, "sum", offsets=offsets, axis=0)
    rows = partial.new_full((len(plan.numels), NUM_FIELDS), torch.nan)  # unset columns are absent
    rows[:, N] = numels
    for column, field in enumerate(_SUMMED):
        rows[:, field] = sums[:, column]
    # The column held the non-zero finite elements: the rest are zeros.
    rows[:, ZERO] = numels - sums[:, 0] - sums[:, 1] - sums[:, 2]
    rows[:, MIN] = torch.segment_reduce(extremes[0], "min", offsets=offsets)
    rows[:, MAX] = torch.segment_reduce(extremes[1], "max", offsets=offsets)
    rows[:, HIST_N] = 0
    return rows
