"""Gradients that are not on any rank as a whole: `Partial`, the sum over ranks of what each has.

SequenceParallel leaves the gradients of its norm layers so until the optimizer needs them. Their sketches cannot be
merged, so the addends are kept if they are small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sonde.probe.optimizer.tap import OptimizerStep
from sonde.probe.sharded import local_of, placed
from sonde.reduce.addends import PendingCopies, can_copy
from sonde.reduce.scalars import PendingScalars
from sonde.schema.addends import MAX_ADDEND_BYTES, Addends
from sonde.session.model.parameter_subset import ParameterSubset

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from sonde.probe.model import NamedParameter
    from sonde.session.model.site_ids import SiteIds


class AddendCollector:
    """The addends of one step, until the writer takes them."""

    def __init__(self, sites: SiteIds, on_unreadable: Callable[[str, str], None]) -> None:
        self._sites, self._on_unreadable = sites, on_unreadable
        self._pending: list[tuple[list[int], PendingCopies, PendingScalars]] = []

    def collect(self, step: OptimizerStep, parts: list[ParameterSubset]) -> None:
        """Copy the gradients of this step that are divided in another way than their parameter."""
        found = [pair for part in parts if part.has_grads for pair in part.other_grads()]
        found += [(named, p.grad) for named, p in step.replicas if p.grad is not None and _is_sum(p.grad)]
        keys, copied, factors = [], [], []
        for named, grad in found:
            if self._is_kept(named, grad):
                keys.append(self._sites.of_parameter("grad", named, grad))
                copied.append(local_of(grad))
                factors.append(step.clips.factors.get(id(named.ref()), 1.0))
        if copied:
            numbers = [*factors, 1.0 if step.grad_scale is None else step.grad_scale]
            pending = PendingScalars([torch.as_tensor(number) for number in numbers])
            self._pending.append((keys, PendingCopies(copied), pending))

    def _is_kept(self, named: NamedParameter, grad: Tensor) -> bool:
        where = placed(grad)
        if not where.is_owner:
            return False
        if where.shard.how == "sum" and where.is_known and can_copy(local_of(grad), MAX_ADDEND_BYTES):
            return True
        why = "a partial DTensor larger than 64 KiB" if where.shard.how == "sum" else "divided unlike its parameter"
        self._on_unreadable(f"grad/{named.name}", why)
        return False

    def take(self, step: int) -> Callable[[], Addends | None] | None:
        """Creates the record on the writer thread; None if there is nothing."""
        pending, self._pending = self._pending, []
        if not pending:
            return None

        def resolve() -> Addends:
            keys: list[int] = []
            values: list[NDArray[Any]] = []
            factors: list[float] = []
            for own_keys, copies, numbers in pending:
                *own_factors, scale = numbers.resolve()
                keys += own_keys
                factors += own_factors
                values += [value / value.dtype.type(scale) for value in copies.resolve()]
            return Addends(step, np.array(keys, np.int32), values, np.array(factors))

        return resolve


def _is_sum(grad: Tensor) -> bool:
    return placed(grad).shard.how == "sum"
