"""What gradient clipping took away: notes the factor of every clip between two optimizer steps.

`clip_grad_norm_` looks its inner function up in its module on every call, so replacing that one name sees all callers,
however they imported it. One replacement serves all taps; the originals come back when the last tap is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from sonde.probe.guards import protected, quiet
from sonde.probe.replaced import Replaced

_taps: list[ClipTap] = []
_replaced = Replaced()


class ClipTap:
    """Collects id(param) -> factor until `take`."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._factors: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        """The gradient that was clipped, and by what: a gradient made since then was not."""
        self._norm: tuple[Any, Any] | None = None
        self.note_norm = protected(self._note_norm, on_error, "clip by norm")
        self.note_before_value = protected(self._note_before_value, on_error, "clip by value")
        self.note_after_value = protected(self._note_after_value, on_error, "clip by value")
        if not _taps:
            for target in _TARGETS:
                _replaced.put(*target)
        _taps.append(self)

    def detach(self) -> None:
        if self in _taps:
            _taps.remove(self)
            if not _taps:
                _replaced.restore()
        self._factors.clear()

    def take(self, parameters: Iterable[Tensor] | None = None) -> dict[int, Any]:
        """id(param) -> factor, of these parameters (another optimizer may still ask for its own) or of all."""
        taken = self._factors
        if parameters is None:
            self._factors = {}
            return {key: factor for key, (_, factor) in taken.items()}
        found: dict[int, Any] = {}
        if not taken:
            return found
        for parameter in parameters:
            clipped, factor = taken.pop(id(parameter), (None, None))
            if clipped is not None and clipped() is parameter.grad:
                found[id(parameter)] = factor
        return found

    def take_norm(self) -> tuple[Any, Any] | None:
        """(total norm before clipping, the limit) of the last clip by norm."""
        norm, self._norm = self._norm, None
        return norm

    def _note_norm(self, parameters: Any, max_norm: Any, total_norm: Any) -> None:
        with quiet():
            factor = torch.clamp(max_norm / (total_norm.detach() + 1e-6), max=1.0)
            self._norm = (total_norm.detach(), max_norm)
            for parameter in _listed(parameters):
                self._multiply(parameter, factor)

    def _note_before_value(self, parameters: Any, norms: list[Any]) -> None:
        with quiet():
            norms.extend(_norms(parameters))

    def _note_after_value(self, parameters: Any, norms: list[Any]) -> None:
        with quiet():
            for (parameter, before), (_, after) in zip(norms, _norms(parameters), strict=True):
                self._multiply(parameter, torch.where(before > 0, after / before, 1.0))

    def _multiply(self, parameter: Tensor, factor: Any) -> None:
        grad = parameter.grad
        if grad is not None:
            clipped, before = self._factors.get(id(parameter), (None, 1.0))
            is_same = clipped is not None and clipped() is grad
            self._factors[id(parameter)] = weakref.ref(grad), before * factor if is_same else factor


def _watch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = parameters if isinstance(parameters, Tensor) else list(parameters)  # a generator is read once
        result = original(parameters, max_norm, total_norm, *args, **kwargs)
        for tap in _taps:
            tap.note_norm(parameters, max_norm, total_norm)
        return result

    return clip


def _watch_value(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = parameters if isinstance(parameters, Tensor) else list(parameters)  # a generator is read once
        norms: dict[int, list[Any]] = {id(tap): [] for tap in _taps}
        for tap in _taps:
            tap.note_before_value(parameters, norms[id(tap)])
        result = original(parameters, *args, **kwargs)
        for tap in _taps:
            tap.note_after_value(parameters, norms.get(id(tap), []))
        return result

    return clip


# A torch that clips in another way lacks a name: clipping is then simply not seen.
_TARGETS: Final = (
    (clip_grad, "_clip_grads_with_norm_", _watch_norm),
    (torch.nn.utils, "clip_grads_with_norm_", _watch_norm),
    (clip_grad, "clip_grad_value_", _watch_value),
    (torch.nn.utils, "clip_grad_value_", _watch_value),
)


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else parameters


def _norms(parameters: Any) -> list[tuple[Tensor, Tensor]]:
    having = [(p, p.grad) for p in _listed(parameters) if p.grad is not None and p.grad.layout is torch.strided]
    # float16 cannot hold the norm of many float16 numbers.
    norms = torch._foreach_norm([g.float() if g.dtype.itemsize < 4 else g for _, g in having]) if having else ()
    return [(parameter, norm) for (parameter, _), norm in zip(having, norms, strict=True)]
