"""What an optimizer step did to a list of parameters: their sketches before, the true update after, and paired sums.

The update is what really happened to the weights (after - before), whatever the optimizer, weight decay included.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sonde.reduce.plan import Held
from sonde.reduce.rows import scratch
from sonde.reduce.torch import Part, Reducer, Table, TensorList, negate_rows
from sonde.schema.sketch import GRAD_MOMENT, GRAD_SQ_OVER_V, GRAD_UPDATE


@dataclass(slots=True)
class Moments:
    """Adam's state of the same parameters, in the same order, after the step."""

    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]
    correction: Any
    """1 - beta2**t, which undoes the start of the second moment at zero; a number or a tensor on the device."""
    floor: float
    """eps**2: a second moment below it has no effect on the step."""


class OptimizerPass:
    """Used once before and once after each recorded optimizer step."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self._before: dict[Hashable, TensorList] = {}
        self._held: dict[tuple[int, str], Held] = {}

    def before(
        self,
        name: Hashable,
        keys: Sequence[int],
        params: Sequence[Tensor],
        *,
        sketch: bool,
        keep: bool,
        histogram: bool,
    ) -> None:
        """Sketch the parameters, and keep a copy of them when the update is wanted."""
        if not (sketch or keep):
            return
        listed = self.reducer.list_for(("before" if keep else "param", name), keys, params, keep=keep)
        if keep:
            self._before[name] = listed
        if not sketch:
            listed.load(params)
            return
        for table in listed.sketch(params, turn=self.reducer.turn if histogram else None):
            self.reducer.hold(table)

    def after(
        self,
        name: Hashable,
        keys: Sequence[int],
        params: Sequence[Tensor],
        *,
        grads: Sequence[Tensor] | None = None,
        moments: Moments | None = None,
        histogram: bool = False,
    ) -> None:
        """Sketch the update of the parameters kept by `before`; with gradients and moments, the paired sums too."""
        listed = self._before.pop(name, None)
        if listed is None:
            return
        turn = self.reducer.turn if histogram else None
        for part in listed.parts:
            part.held.subtract([params[i].detach() for i in part.indices])  # before - after: minus the update
            table = listed.table(part, None, turn, np.array(keys, np.int32))
            negate_rows(table)
            if grads is not None and all(_matches(params[i], grads[i]) for i in part.indices):
                self._pair(part, table, grads, moments)
            self.reducer.hold(table)

    def _pair(self, part: Part, table: Table, grads: Sequence[Tensor], moments: Moments | None) -> None:
        walks = [part.plan.blocks(part.held, None), self._walk(part, "grad", grads)]
        if moments is not None:
            walks += [self._walk(part, "exp_avg", moments.exp_avg), self._walk(part, "exp_avg_sq", moments.exp_avg_sq)]
        sums = _PairSums(part)
        for blocks in zip(*walks, strict=True):
            sums.add(blocks[0].first_row, [b.values for b in blocks], moments.floor if moments is not None else 0.0)
        table.rows[:, GRAD_UPDATE] = -sums.total(0)
        if moments is not None:
            table.rows[:, GRAD_MOMENT] = sums.total(1)
            table.rows[:, GRAD_SQ_OVER_V] = sums.total(2) * moments.correction

    def _walk(self, part: Part, purpose: str, tensors: Sequence[Tensor]) -> Any:
        mine = [tensors[i].detach() for i in part.indices]
        held = self._held.get((id(part), purpose))
        if held is None or held.plan is not part.plan:
            held = self._held[id(part), purpose] = Held(part.plan, [t.shape for t in mine])
        held.load(mine)
        return part.plan.blocks(held, mine, purpose=purpose)


class _PairSums:
    """Row sums of products: float32 within a row on the CPU, float64 on a device and across rows."""

    def __init__(self, part: Part) -> None:
        self.plan = part.plan
        dtype = torch.float64 if part.plan.device.type == "cuda" else part.plan.dtype
        self.values = torch.zeros((3, part.plan.num_rows), dtype=dtype, device=part.plan.device)

    def add(self, first: int, blocks: list[Tensor], floor: float) -> None:
        negated_update, grad = blocks[:2]
        rows = slice(first, first + grad.shape[0])
        product = self._buffer(grad)
        torch.sum(torch.mul(grad, negated_update, out=product), 1, dtype=self.values.dtype, out=self.values[0, rows])
        if len(blocks) > 2:
            first_moment, second_moment = blocks[2:]
            torch.sum(torch.mul(grad, first_moment, out=product), 1, dtype=self.values.dtype, out=self.values[1, rows])
            # A gradient whose square is zero in float32 is far below the floor: its quotient is nothing too.
            divisor = torch.clamp(second_moment, min=floor, out=self._buffer(grad, "divisor"))
            torch.div(torch.mul(grad, grad, out=product), divisor, out=product)
            torch.sum(product, 1, dtype=self.values.dtype, out=self.values[2, rows])

    def _buffer(self, like: Tensor, purpose: str = "product") -> Tensor:
        if like.device.type == "cpu":
            return scratch.get(purpose, like.dtype, tuple(like.shape))
        return torch.empty_like(like)

    def total(self, which: int) -> Any:
        """Per tensor, in the plan's order; the packed zeros add nothing."""
        if self.plan.device.type == "cpu":
            return np.add.reduceat(self.values[which].numpy().astype(np.float64), self.plan.starts)
        offsets, _ = self.plan.on_device(self.values.dtype)
        return torch.segment_reduce(self.values[which].contiguous(), "sum", offsets=offsets)


def _matches(param: Tensor, grad: Tensor) -> bool:
    return grad.layout is torch.strided and grad.shape == param.shape and grad.stride() == param.stride()
