"""What an optimizer step did to a list of parameters: their sketches before, the true update after, and paired sums.

The update is what really happened to the weights (after - before), whatever the optimizer, weight decay included.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.reduce.lists import Part, TensorList
from sonde.reduce.native import Pairs
from sonde.reduce.plan import LARGE, LARGE_KEPT, Held
from sonde.reduce.rows import scratch
from sonde.reduce.sample import sample, stack_samples
from sonde.reduce.torch import Reducer, Table, negate_rows
from sonde.schema.sketch import GRAD_MOMENT, GRAD_SQ_OVER_V, GRAD_UPDATE

_PAIRED: Final = slice(GRAD_UPDATE, GRAD_SQ_OVER_V + 1)
_COMPLEX: Final = frozenset({torch.complex64, torch.complex128})


@dataclass(slots=True)
class Moments:
    """Adam's state of the same parameters, in the same order, after the step."""

    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]
    correction: Any
    """1 - beta2**t, which undoes the start of the second moment at zero; a number or a tensor on the device."""
    floor: Any
    """eps**2 * correction: a second moment below it has no effect on the step. A number or a tensor, as above."""


class OptimizerPass:
    """Used once before and once after each recorded optimizer step."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self._before: dict[Hashable, tuple[TensorList, list[int]]] = {}

    def forget(self) -> None:
        """Let go of all memory."""
        self._before.clear()

    def before(
        self,
        name: Hashable,
        keys: Sequence[int],
        params: Sequence[Tensor],
        *,
        sketch: bool,
        keep: bool,
        pairs: bool = False,
        histogram: bool = False,
    ) -> None:
        """Sketch the parameters; `keep` a copy where the update is wanted, for `pairs` laid out as gradients are."""
        if not (sketch or keep):
            return
        ids, params = [id(p) for p in params], _real(params)
        large = LARGE_KEPT if keep and not pairs else LARGE
        listed = self.reducer.list_for(("before", name, keep, pairs), keys, params, keep=keep, large=large)
        if keep:
            self._before[name] = listed, ids
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
        listed, ids = self._before.pop(name, (None, []))
        if listed is None or ids != [id(p) for p in params]:
            return  # not the parameters that were kept: their difference would be no update
        params = _real(params)
        grads = None if grads is None else _real(grads)
        if moments is not None:
            moments = replace(moments, exp_avg=_real(moments.exp_avg), exp_avg_sq=_real(moments.exp_avg_sq))
        turn = self.reducer.turn if histogram else None
        for part in listed.parts:
            table = self._fused(listed, part, keys, params, grads, moments, turn)
            if table is not None:
                self.reducer.hold(table)
                continue
            # before - after: minus the update
            pairs = None if grads is None else _pairs(part, params, grads, moments)
            is_read = turn is not None or (grads is not None and pairs is None)
            rows = part.subtract([params[i] for i in part.indices], is_read=is_read, pairs=pairs)
            table = listed.table(part, rows, None, turn, np.array(keys, np.int32))
            negate_rows(table)
            if pairs is not None and moments is not None:
                table.rows[:, GRAD_SQ_OVER_V] *= float(moments.correction)
            elif grads is not None and pairs is None:
                self._pair_matching(part, table, params, grads, moments)
            self.reducer.hold(table)

    def _fused(
        self,
        listed: TensorList,
        part: Part,
        keys: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor] | None,
        moments: Moments | None,
        turn: int | None,
    ) -> Table | None:
        """The whole of it in one reading, where the fused kernel can; it needs contiguous tensors of few dtypes."""

        def mine(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
            return None if tensors is None else [tensors[part.indices[i]].detach() for i in part.plan.order]

        if part.updates is None:
            return None
        after, before = mine(params), part.in_order(None)
        gradients = mine(grads)
        states = None if moments is None or grads is None else (mine(moments.exp_avg), mine(moments.exp_avg_sq))
        if after is None or not _is_uniform(after, gradients, *(states or ())):
            return None
        floor = moments.floor if moments is not None else 0.0
        if not isinstance(floor, Tensor):
            floor = torch.full((), floor, dtype=torch.float32, device=after[0].device)
        rows = part.updates.rows(before, after, gradients, states, floor)  # type: ignore[arg-type]
        if states is not None and moments is not None:
            rows[:, GRAD_SQ_OVER_V] *= moments.correction
        table = Table(np.array(keys, np.int32)[part.key_order], rows)
        if turn is not None:
            size = self.reducer.hist_samples
            samples = [
                sample(new, size, turn).to(old.dtype) - sample(old, size, turn)
                for new, old in zip(after, before, strict=True)
            ]
            table.samples = stack_samples(samples, size)
            table.sampled = np.array([s.numel() for s in samples])
        return table

    def _pair_matching(
        self,
        part: Part,
        table: Table,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        moments: Moments | None,
    ) -> None:
        """A gradient that cannot be multiplied with its parameter (a sparse one) leaves the others their sums."""
        unmatched = {i for i in part.indices if not _matches(params[i], grads[i])}
        if len(unmatched) == len(part.indices):
            return
        self._pair(
            part,
            table,
            [p if i in unmatched else g for i, (p, g) in enumerate(zip(params, grads, strict=True))],
            moments,
        )
        for row, place in enumerate(part.plan.order.tolist()):
            if unmatched and part.indices[place] in unmatched:
                table.rows[row, _PAIRED] = torch.nan

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
        for large in part.plan.large:
            # What is kept lies in the order of its elements, so that is how it must be walked.
            mine[large] = mine[large].contiguous()
        held = part.paired.get(purpose)
        if held is None:
            held = part.paired[purpose] = Held(part.plan, [t.shape for t in mine])
        held.load(mine)
        return part.plan.blocks(held, mine, purpose=purpose)


def _pairs(part: Part, params: Sequence[Tensor], grads: Sequence[Tensor], moments: Moments | None) -> Pairs | None:
    """For the native kernel, where it can read them all; else None."""
    if part.addresses is None:
        return None

    def mine(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[part.indices[i]] for i in part.plan.order]

    states = None if moments is None else (mine(moments.exp_avg), mine(moments.exp_avg_sq))
    pairs = Pairs(mine(grads), states, 0.0 if moments is None else float(moments.floor))
    return pairs if part.can_pair([params[i] for i in part.indices], pairs) else None


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
    return grad.layout is torch.strided and grad.shape == param.shape and grad.device == param.device


def _real(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Complex parameters, gradients and moments as pairs of real numbers, which is how optimizers treat them."""
    if not any(t.dtype in _COMPLEX for t in tensors):
        return tensors
    return [torch.view_as_real(t.detach().resolve_conj()) if t.dtype in _COMPLEX else t for t in tensors]


def _is_uniform(*lists: list[Tensor] | None) -> bool:
    """Contiguous throughout, and of one ordinary dtype in each list."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return all(
        tensors is None
        or (tensors[0].dtype in known and all(t.is_contiguous() and t.dtype == tensors[0].dtype for t in tensors))
        for tensors in lists
    )
