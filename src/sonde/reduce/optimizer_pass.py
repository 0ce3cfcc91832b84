"""The effect of an optimizer step on a list of parameters: sketches before, the true update after, and paired sums.

The update is the actual change of the weights (after - before), whatever the optimizer, weight decay included.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.reduce.cpu.native import Pairs
from sonde.reduce.cpu.plan import LARGE, LARGE_KEPT, Held
from sonde.reduce.cpu.rows import scratch
from sonde.reduce.lists import Part, TensorList
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
    """1 - beta2**t, which corrects the start of the second moment at zero. One for each parameter, as an array or as a
    tensor on the device; or a single number for all."""
    floor: Any
    """eps**2 * correction: a second moment below it has no effect on the step. One for each parameter, as above."""

    def corrections(self, part: Part) -> Any:
        """For each row of a part."""
        return _of_rows(self.correction, part)

    def floors(self, part: Part) -> Any:
        """For each row of a part."""
        return _of_rows(self.floor, part)


def _of_rows(numbers: Any, part: Part) -> Any:
    if getattr(numbers, "ndim", 0) == 0:
        return numbers
    places = [part.indices[i] for i in part.plan.order]
    if isinstance(numbers, Tensor):
        return numbers.index_select(0, torch.from_numpy(np.array(places)).to(numbers.device, non_blocking=True))
    return numbers[places]


class OptimizerPass:
    """Used once before and once after each recorded optimizer step."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self._before: dict[Hashable, tuple[TensorList, list[int]]] = {}

    def forget(self) -> None:
        """Release all memory."""
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
        """Sketch the parameters; `keep` a copy if the update is needed, for `pairs` laid out like the gradients."""
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
            return  # not the kept parameters: their difference would not be an update
        params = _real(params)
        grads = None if grads is None else _real(grads)
        if moments is not None:
            moments = replace(moments, exp_avg=_real(moments.exp_avg), exp_avg_sq=_real(moments.exp_avg_sq))
        turn = self.reducer.turn if histogram else None
        grads, unmatched = _matched(params, grads)
        for part in listed.parts:
            mine = None if unmatched.issuperset(part.indices) else grads
            table = self._fused(listed, part, keys, params, mine, moments, turn)
            if table is None:
                table = self._subtracted(listed, part, keys, params, mine, moments, turn)
            for row, place in enumerate(part.plan.order.tolist() if unmatched else ()):
                if part.indices[place] in unmatched:
                    table.rows[row, _PAIRED] = torch.nan
            self.reducer.hold(table)
        for table in listed.empty_tables(np.array(keys, np.int32)):
            self.reducer.hold(table)

    def _subtracted(
        self,
        listed: TensorList,
        part: Part,
        keys: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor] | None,
        moments: Moments | None,
        turn: int | None,
    ) -> Table:
        # before - after: minus the update
        pairs = None if grads is None else _pairs(part, params, grads, moments)
        is_read = turn is not None or (grads is not None and pairs is None)
        rows = part.subtract([params[i] for i in part.indices], is_read=is_read, pairs=pairs)
        table = listed.table(part, rows, None, turn, np.array(keys, np.int32))
        negate_rows(table)
        if pairs is not None and moments is not None:
            table.rows[:, GRAD_SQ_OVER_V] *= moments.corrections(part)
        elif grads is not None and pairs is None:
            self._pair(part, table, grads, moments)
        return table

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
        """Everything in one read, if the fused kernel can; it needs contiguous tensors of few dtypes."""

        def mine(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
            return None if tensors is None else [tensors[part.indices[i]].detach() for i in part.plan.order]

        if part.updates is None:
            return None
        after, before = mine(params), part.in_order(None)
        gradients = mine(grads)
        states = None if moments is None or grads is None else (mine(moments.exp_avg), mine(moments.exp_avg_sq))
        if after is None or not _is_uniform(after, gradients, *(states or ())):
            return None
        floors = _on(after[0].device, 0.0 if moments is None else moments.floors(part), torch.float32, len(after))
        rows = part.updates.rows(before, after, gradients, states, floors)  # type: ignore[arg-type]
        if states is not None and moments is not None:
            rows[:, GRAD_SQ_OVER_V] *= _like(rows, moments.corrections(part))
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

    def _pair(self, part: Part, table: Table, grads: Sequence[Tensor], moments: Moments | None) -> None:
        walks = [part.plan.blocks(part.held, None), self._walk(part, "grad", grads)]
        if moments is not None:
            walks += [self._walk(part, "exp_avg", moments.exp_avg), self._walk(part, "exp_avg_sq", moments.exp_avg_sq)]
        sums = _PairSums(part, moments.floors(part) if moments is not None else 0.0)
        for blocks in zip(*walks, strict=True):
            sums.add(blocks[0].first_row, [b.values for b in blocks])
        table.rows[:, GRAD_UPDATE] = -sums.total(0)
        if moments is not None:
            table.rows[:, GRAD_MOMENT] = sums.total(1)
            total = sums.total(2)
            table.rows[:, GRAD_SQ_OVER_V] = total * _like(total, moments.corrections(part))

    def _walk(self, part: Part, purpose: str, tensors: Sequence[Tensor]) -> Any:
        mine = [tensors[i].detach() for i in part.indices]
        for large in part.plan.large:
            # The copy is in element order, so it must be walked that way.
            mine[large] = mine[large].contiguous()
        held = part.paired.get(purpose)
        if held is None:
            held = part.paired[purpose] = Held(part.plan, [t.shape for t in mine])
        held.load(mine)
        return part.plan.blocks(held, mine, purpose=purpose)


def _pairs(part: Part, params: Sequence[Tensor], grads: Sequence[Tensor], moments: Moments | None) -> Pairs | None:
    """For the native kernel, if it can read them all; otherwise None."""
    if part.addresses is None:
        return None

    def mine(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[part.indices[i]] for i in part.plan.order]

    states = None if moments is None else (mine(moments.exp_avg), mine(moments.exp_avg_sq))
    pairs = Pairs(mine(grads), states, 0.0 if moments is None else moments.floors(part))
    return pairs if part.can_pair([params[i] for i in part.indices], pairs) else None


class _PairSums:
    """Row sums of products, each rounded to the parameters' type and added in float64."""

    def __init__(self, part: Part, floors: Any) -> None:
        """`floors` of the second moments: one for each tensor in the plan's order, or one for all."""
        plan = self.plan = part.plan
        self.values = torch.zeros((3, plan.num_rows), dtype=torch.float64, device=plan.device)
        owners = torch.from_numpy(np.repeat(np.arange(len(plan.starts)), np.diff([*plan.starts, plan.num_rows])))
        each = _on(plan.device, floors, plan.dtype, len(plan.starts))
        self.floors = each.index_select(0, owners.to(plan.device, non_blocking=True))[:, None]

    def add(self, first: int, blocks: list[Tensor]) -> None:
        negated_update, grad = blocks[:2]
        rows = slice(first, first + grad.shape[0])
        product = self._buffer(grad)
        torch.sum(torch.mul(grad, negated_update, out=product), 1, dtype=self.values.dtype, out=self.values[0, rows])
        if len(blocks) > 2:
            first_moment, second_moment = blocks[2:]
            torch.sum(torch.mul(grad, first_moment, out=product), 1, dtype=self.values.dtype, out=self.values[1, rows])
            # A gradient whose square is zero in float32 is far below the floor: its quotient is zero too.
            divisor = torch.maximum(second_moment, self.floors[rows], out=self._buffer(grad, "divisor"))
            torch.div(torch.mul(grad, grad, out=product), divisor, out=product)
            torch.sum(product, 1, dtype=self.values.dtype, out=self.values[2, rows])

    def _buffer(self, like: Tensor, purpose: str = "product") -> Tensor:
        if like.device.type == "cpu":
            return scratch.get(purpose, like.dtype, tuple(like.shape))
        return torch.empty_like(like)

    def total(self, which: int) -> Any:
        """Per tensor, in the plan's order; the packed zeros add nothing."""
        if self.plan.device.type == "cpu":
            return np.add.reduceat(self.values[which].numpy(), self.plan.starts)
        offsets, _ = self.plan.on_device(self.values.dtype)
        return torch.segment_reduce(self.values[which].contiguous(), "sum", offsets=offsets)


def _like(rows: Any, numbers: Any) -> Any:
    """Copy numbers of the host to the rows' device, without waiting."""
    if isinstance(rows, Tensor) and isinstance(numbers, np.ndarray):
        return torch.from_numpy(numbers).to(rows.device, non_blocking=True)
    return numbers


def _on(device: torch.device, numbers: Any, dtype: torch.dtype, count: int) -> Tensor:
    """`num` numbers on a device, from as many there or on the host, or from one for all."""
    held = numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers, np.float64))
    return held.to(device, dtype, non_blocking=True).expand(count).contiguous()


def _matched(params: Sequence[Tensor], grads: Sequence[Tensor] | None) -> tuple[Sequence[Tensor] | None, set[int]]:
    """The gradients, and which of them cannot be multiplied with their parameter, such as sparse ones: the parameter
    itself replaces those, so that the others get their sums as usual."""
    if grads is None:
        return None, set()
    unmatched = {i for i, (p, g) in enumerate(zip(params, grads, strict=True)) if not _matches(p, g)}
    if not unmatched:
        return grads, unmatched
    return [p if i in unmatched else g for i, (p, g) in enumerate(zip(params, grads, strict=True))], unmatched


def _matches(param: Tensor, grad: Tensor) -> bool:
    return grad.layout is torch.strided and grad.shape == param.shape and grad.device == param.device


def _real(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Complex parameters, gradients and moments as pairs of real numbers, which is how optimizers treat them."""
    if not any(t.dtype in _COMPLEX for t in tensors):
        return tensors
    return [torch.view_as_real(t.detach().resolve_conj()) if t.dtype in _COMPLEX else t for t in tensors]


def _is_uniform(*lists: list[Tensor] | None) -> bool:
    """Whether all are contiguous, and of one ordinary dtype in each list."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return all(
        tensors is None
        or (tensors[0].dtype in known and all(t.is_contiguous() and t.dtype == tensors[0].dtype for t in tensors))
        for tensors in lists
    )
