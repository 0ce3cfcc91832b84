"""Steps that a `GradScaler` skips, and the scale of the loss: no optimizer hook reports them.

`GradScaler.step` is replaced in its class while there are listeners; subclasses that only extend it are seen too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sonde.probe.guards import protected
from sonde.probe.optimizer import compiled_steps
from sonde.probe.replaced import Replaced

_taps: list[ScalerTap] = []
_replaced = Replaced()
_handles: list[Any] = []


class _Here(threading.local):
    """Per thread: several may train, each with its scaler."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        """Ids of the optimizers whose steps have started inside the current `GradScaler.step`."""
        self.scales: list[Tensor | None] = []
        """The loss scales of the scalers that are making a step now; the innermost last."""


_here = _Here()


class ScalerTap:
    """Calls `on_skipped` with an optimizer whose step a scaler skipped."""

    def __init__(self, on_skipped: Callable[[Optimizer], None], on_error: Callable[[str, Exception], None]) -> None:
        self.on_skipped = protected(on_skipped, on_error, "skipped step")
        if not _taps:
            note_begun = protected(_note_begun, on_error, "beginning of a scaled step")
            _replaced.put(GradScaler, "step", _watch)
            _handles.append(register_optimizer_step_pre_hook(compiled_steps.beginning(note_begun)))
            compiled_steps.follow(_compiled)
        _taps.append(self)

    def detach(self) -> None:
        if self in _taps:
            _taps.remove(self)
            if not _taps:
                _replaced.restore()
                _handles.pop().remove()
                compiled_steps.unfollow(_compiled)


def loss_scale() -> Tensor | None:
    """The loss scale of the step in progress; None if no scaler makes it."""
    scales = _here.scales
    return scales[-1] if scales else None


def _watch(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        begun, scales = _here.begun, _here.scales
        if not scales:
            begun.clear()
        scales.append(getattr(self, "_scale", None))
        try:
            result = original(self, optimizer, *args, **kwargs)
            # A non-torch optimizer calls no hook, so it is unknown whether it stepped. And if other code has replaced
            # the method between two of ours, both are called: the outer one reports.
            if isinstance(optimizer, Optimizer) and id(optimizer) not in begun and len(scales) == 1:
                for tap in (*_taps,):
                    tap.on_skipped(optimizer)
        finally:
            scales.pop()
        return result

    return step


def _note_begun(optimizer: Optimizer, *_: object) -> None:
    if _here.scales:
        _here.begun.append(id(optimizer))


class _Compiled:
    """A `Follower`: a compiled step has started, or was made, or is not known to have been skipped."""

    def begun(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        _note_begun(optimizer)

    def ended(self, optimizer: Optimizer) -> None: ...

    def made(self, optimizer: Optimizer) -> None:
        _note_begun(optimizer)

    def unseen(self, optimizer: Optimizer) -> None: ...


_compiled = _Compiled()
