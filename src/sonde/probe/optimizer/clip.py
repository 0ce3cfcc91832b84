"""The effect of gradient clipping: records the factor of every clip between two optimizer steps.

torch wraps its clipping functions in `no_grad`. Replacing the function inside such a wrapper sees all callers, however
and whenever they imported it. One replacement serves all taps; the originals are restored when the last tap is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from sonde.probe.guards import protected, quiet
from sonde.probe.replaced import Replaced
from sonde.probe.sharded import is_sharded, local_of

UNKNOWN: Final = 0.0
"""The factor of a gradient that was changed after it was clipped: its earlier value cannot be determined."""
_taps: list[ClipTap] = []
_following: list[ClipTap] = []
"""Those that are not paused."""
_replaced = Replaced()


@dataclass(slots=True)
class Clips:
    """The effect of clipping on the gradients of one optimizer step."""

    factors: dict[int, Any] = field(default_factory=dict)
    """id(param) -> the factor of its gradient; a tensor on the gradient's device, or `UNKNOWN`."""
    norms: list[tuple[Any, Any]] = field(default_factory=list)
    """(total norm before clipping, limit) of each `clip_grad_norm_` that was the first for its parameters."""


@dataclass(slots=True, frozen=True)
class _Clipped:
    """One gradient, as its last clip left it."""

    grad: weakref.ref[Tensor]
    version: int
    factor: Any
    norm: tuple[Any, Any] | None

    def is_of(self, grad: Tensor | None) -> bool:
        """Whether this still refers to the same gradient, not to a newer one."""
        return grad is not None and self.grad() is grad

    def is_unchanged(self, grad: Tensor) -> bool:
        """Whether it was not written to since, by a backward pass, `zero_grad(set_to_none=False)` or the user."""
        return self.version == _version(grad)


class ClipTap:
    """Collects clips until `take`."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._clipped: dict[int, _Clipped] = {}
        self.join = protected(_join, on_error, "clip by norm")
        self.note_begin = protected(self._forget_changed, on_error, "clip")
        self.note_norm = protected(self._note_norm, on_error, "clip by norm")
        self.note_before_value = protected(self._note_before_value, on_error, "clip by value")
        self.note_after_value = protected(self._note_after_value, on_error, "clip by value")
        if not _taps:
            for name, watch in _TARGETS.items():
                for cell in _wrapped(name):
                    _replaced.put(cell, "cell_contents", watch)
        _taps.append(self)
        _following.append(self)

    def detach(self) -> None:
        self.pause()
        if self in _taps:
            _taps.remove(self)
            if not _taps:
                _replaced.restore()
        self._clipped.clear()

    def pause(self) -> None:
        """Follow no clips until `resume`."""
        if self in _following:
            _following.remove(self)
        self._clipped.clear()

    def resume(self) -> None:
        if self not in _following and self in _taps:
            _following.append(self)

    def take(self, parameters: Iterable[Tensor]) -> Clips:
        """The clips of the gradients that these parameters have now; another optimizer may still ask for its own."""
        found = Clips()
        if not self._clipped:
            return found
        norms: dict[int, tuple[Any, Any]] = {}
        for parameter in parameters:
            clipped, grad = self._clipped.pop(id(parameter), None), parameter.grad
            if clipped is None or grad is None or not clipped.is_of(grad):
                continue
            found.factors[id(parameter)] = clipped.factor if clipped.is_unchanged(grad) else UNKNOWN
            if clipped.norm is not None:
                norms[id(clipped.norm)] = clipped.norm
        found.norms = list(norms.values())
        return found

    def _forget_changed(self, parameters: Any) -> None:
        """Before a clip: an earlier clip of a gradient counts only if nothing else has written to the gradient
        since."""
        for parameter in _listed(parameters) if self._clipped else ():
            clipped, grad = self._clipped.get(id(parameter)), parameter.grad
            if clipped is not None and not (grad is not None and clipped.is_of(grad) and clipped.is_unchanged(grad)):
                del self._clipped[id(parameter)]

    def _note_norm(self, parameters: Any, max_norm: Any, total_norm: Any) -> None:
        with quiet():
            total = local_of(total_norm).detach()
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            norm = total, max_norm
            for parameter in _listed(parameters):
                self._multiply(parameter, factor, norm)

    def _note_before_value(self, parameters: Any, norms: list[Any]) -> None:
        with quiet():
            norms.extend(_norms(parameters))

    def _note_after_value(self, parameters: Any, norms: list[Any]) -> None:
        with quiet():
            for (parameter, before), (_, after) in zip(norms, _norms(parameters), strict=True):
                # A non-finite norm says nothing: infinity became finite, and NaN hides the other values.
                factor = torch.where(before > 0, after / before, torch.where(before == 0, 1.0, UNKNOWN))
                self._multiply(parameter, factor)

    def _multiply(self, parameter: Tensor, factor: Any, norm: tuple[Any, Any] | None = None) -> None:
        grad = parameter.grad
        if grad is not None:
            before = self._clipped.get(id(parameter))
            if before is not None:
                factor, norm = before.factor * factor, before.norm or norm
            self._clipped[id(parameter)] = _Clipped(weakref.ref(grad), _version(grad), factor, norm)


def _version(grad: Tensor) -> int:
    return 0 if grad.is_inference() else grad._version  # an inference tensor has no version


def _watch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _following:
            return original(parameters, max_norm, total_norm, *args, **kwargs)
        parameters = parameters if isinstance(parameters, Tensor) else list(parameters)  # read a generator only once
        for tap in (*_following,):
            tap.note_begin(parameters)
        norm = [total_norm]
        for tap in (*_following[:1],):
            tap.join(norm)
        result = original(parameters, max_norm, norm[0], *args, **kwargs)
        for tap in (*_following,):
            tap.note_norm(parameters, max_norm, norm[0])
        return result

    return clip


def _join(norm: list[Any]) -> None:
    """Join the norm of sharded gradients over the ranks, in place. torch joins it in its first operation on the norm;
    joined here, it is the same number after the same single collective, and we can read it."""
    (total,) = norm
    if is_sharded(total) and any(placement.is_partial() for placement in total.placements):
        from torch.distributed.tensor import Replicate

        norm[0] = total.redistribute(placements=[Replicate()] * total.device_mesh.ndim)


def _watch_value(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _following:
            return original(parameters, *args, **kwargs)
        parameters = parameters if isinstance(parameters, Tensor) else list(parameters)  # read a generator only once
        noted: list[tuple[ClipTap, list[Any]]] = [(tap, []) for tap in _following]
        for tap, norms in noted:
            tap.note_begin(parameters)
            tap.note_before_value(parameters, norms)
        result = original(parameters, *args, **kwargs)
        for tap, norms in noted:
            tap.note_after_value(parameters, norms)
        return result

    return clip


_TARGETS: Final = {"_clip_grads_with_norm_": _watch_norm, "clip_grad_value_": _watch_value}


def _wrapped(name: str) -> list[Any]:
    """The cell in which torch's wrapper keeps its function, below the wrappers of others. A torch version that clips
    differently has none, and is not seen."""
    function = getattr(clip_grad, name, None)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename == clip_grad.__file__:
            return [cell for cell in function.__closure__ or () if callable(cell.cell_contents)]
        function = getattr(function, "__wrapped__", None)
    return []


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else parameters


def _norms(parameters: Any) -> list[tuple[Tensor, Tensor]]:
    grads = [(p, local_of(p.grad)) for p in _listed(parameters) if p.grad is not None]
    having = [(p, grad) for p, grad in grads if grad.layout is torch.strided]
    # float16 cannot represent the norm of many float16 numbers.
    norms = torch._foreach_norm([g.float() if g.dtype.itemsize < 4 else g for _, g in having]) if having else ()
    return [(parameter, norm) for (parameter, _), norm in zip(having, norms, strict=True)]
