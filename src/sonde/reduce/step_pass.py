"""Predicts the next optimizer step from one read before it, and verifies it; see `triton_step.py`.

Refuses tensors that the fused kernels cannot read: then the caller keeps a copy of the parameters
(`optimizer_pass.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch
from torch import Tensor

from sonde.reduce.dense import is_dense, is_plain
from sonde.reduce.gpu.availability import step_chunks
from sonde.reduce.gpu.update_formula import UpdateFormula
from sonde.reduce.lists import current_stream
from sonde.reduce.table import Check, Table
from sonde.reduce.torch import Reducer

if TYPE_CHECKING:
    from sonde.reduce.gpu.triton_step import StepChunks

Stream = Literal["param", "grad", "first", "second", "update"]
_STREAMS: Final[tuple[Stream, ...]] = ("param", "grad", "first", "second", "update")
_READ: Final = frozenset({"param", "grad"})
"""Streams that exist before the step; the others are correct only if the step follows the formula."""
_KNOWN: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Plan:
    """The fused kernels for one list of parameters, as long as its sizes, dtypes and addresses are the same."""

    form: list[object]
    kernels: StepChunks
    addresses: dict[Stream, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Foreseen:
    """A prediction that waits for the step."""

    params: list[Tensor]
    """The user's tensors, kept no longer than the step lasts."""
    kernels: StepChunks
    tables: list[Table]
    samples: Tensor
    turn: int


class StepPass:
    """Used once before and once after each recorded optimizer step."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self._plans: dict[Hashable, _Plan] = {}
        self._foreseen: dict[Hashable, list[_Foreseen]] = {}
        self._wrong: dict[Hashable, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Release all memory."""
        self._plans.clear()
        self._foreseen.clear()

    def before(
        self,
        name: Hashable,
        keys: Mapping[Stream, Sequence[int]],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        rule: UpdateFormula,
        *,
        histogram: bool = False,
    ) -> list[Table] | None:
        """Read everything once. Returns the gradients' tables, which may still be adjusted; None if this is not
        possible."""
        if name in self._wrong:
            return None
        lists = []
        for number, mine in enumerate(_alike(params, grads, rule)):
            one = [params[i] for i in mine], [grads[i] for i in mine], rule.of(mine)
            kernels = self._kernels((name, number), *one)
            if kernels is None:
                return None
            lists.append((kernels, {which: [ks[i] for i in mine] for which, ks in keys.items()}, *one))
        foreseen: list[_Foreseen] = []
        tables = [self._read(*one, histogram, foreseen) for one in lists]
        self._foreseen[name] = foreseen
        return [grad for grad in tables if grad is not None]

    def _read(
        self,
        kernels: StepChunks,
        keys: Mapping[Stream, Sequence[int]],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        rule: UpdateFormula,
        histogram: bool,
        foreseen: list[_Foreseen],
    ) -> Table | None:
        turn, stream = self.reducer.turn, current_stream(params[0].device)
        rows, samples = kernels.rows(params, grads, rule, turn)
        sampled = np.minimum([p.numel() for p in params], self.reducer.hist_samples)
        tables: dict[Stream, Table] = {}
        for number, which in enumerate(_STREAMS):
            if which in keys:
                tables[which] = table = Table(np.array(keys[which], np.int32), rows[number], stream=stream)
                if histogram:
                    table.samples, table.sampled = samples[number], sampled
                if which in _READ:
                    self.reducer.hold(table)
        waiting = [table for which, table in tables.items() if which not in _READ]
        foreseen.append(_Foreseen(list(params), kernels, waiting, samples, turn))
        return tables.get("grad")

    def after(self, name: Hashable) -> None:
        """The step has been made: compare, and add the predicted tables. Wrong rows are removed on arrival."""
        for foreseen in self._foreseen.pop(name, ()):
            errors = foreseen.kernels.verify(foreseen.params, foreseen.samples, foreseen.turn)
            for table in foreseen.tables:
                table.check = Check(errors, lambda keys, worst: self._note_wrong(name, len(keys), worst))
                self.reducer.hold(table)

    def take_wrong(self) -> dict[Hashable, tuple[int, float]]:
        """Lists whose steps did not follow the formula, each returned once: the number of parameters, and the error."""
        with self._lock:
            told = {name: found for name, found in self._wrong.items() if found[0]}
            self._wrong.update(dict.fromkeys(told, (0, 0.0)))
        return told

    def _note_wrong(self, name: Hashable, num: int, worst: float) -> None:
        with self._lock:  # on the writer thread
            if name not in self._wrong:
                self._wrong[name] = num, worst

    def _kernels(
        self, name: Hashable, params: Sequence[Tensor], grads: Sequence[Tensor], rule: UpdateFormula
    ) -> StepChunks | None:
        """The kernels for this list. The tensors are checked again when one has moved."""
        form: list[object] = [(p.shape, p.dtype, p.device) for p in params]
        plan = self._plans.get(name)
        is_known = plan is not None and plan.form == form
        streams: dict[Stream, Sequence[Tensor | None]]
        streams = {"param": params, "grad": grads, "first": rule.first, "second": rule.second}
        moved: dict[Stream, list[int]] = {}
        for which, tensors in streams.items():
            addresses = [0 if t is None else t.data_ptr() for t in tensors]
            if plan is None or not is_known or plan.addresses[which] != addresses:
                if not _can_read(tensors, params):
                    return None
                moved[which] = addresses
        if moved.keys() & {"first", "second"} and not _is_one_dtype(rule):
            return None
        if plan is None or not is_known:
            kernels = step_chunks([p.numel() for p in params], params[0].device, size=self.reducer.hist_samples)
            if kernels is None:
                return None
            self._plans[name] = plan = _Plan(form, kernels)
        plan.addresses |= moved
        return plan.kernels


def _alike(params: Sequence[Tensor], grads: Sequence[Tensor], rule: UpdateFormula) -> list[list[int]]:
    """Positions of the parameters that one launch can read: on one device, and of the same dtypes."""
    groups: dict[object, list[int]] = {}
    for place, (p, g, m) in enumerate(zip(params, grads, rule.first, strict=True)):
        groups.setdefault((p.device, p.dtype, g.dtype, None if m is None else m.dtype), []).append(place)
    return list(groups.values())


def _can_read(tensors: Sequence[Tensor | None], params: Sequence[Tensor]) -> bool:
    """Whether they are on one GPU, of one ordinary dtype, without gaps, and laid out like the parameters."""
    device = params[0].device
    dtype = next((t.dtype for t in tensors if t is not None), torch.float32)
    return (
        device.type == "cuda"
        and dtype in _KNOWN
        and all(
            t is None or (t.dtype == dtype and t.device == device and is_plain(t) and _lies_like(t, p))
            for t, p in zip(tensors, params, strict=True)
        )
    )


def _is_one_dtype(rule: UpdateFormula) -> bool:
    return len({t.dtype for t in (*rule.first, *rule.second) if t is not None}) <= 1


def _lies_like(tensor: Tensor, param: Tensor) -> bool:
    if tensor.shape != param.shape or not tensor.numel() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return param.is_contiguous() or tensor.stride() == param.stride()
    return is_dense(tensor) and tensor.stride() == param.stride()
