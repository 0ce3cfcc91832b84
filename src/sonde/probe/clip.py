"""What gradient clipping took away: notes the factor of every clip between two optimizer steps.

`clip_grad_norm_` looks its inner function up in its module on every call, so replacing that one name sees all callers,
however they imported it. The original is put back by `detach`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from sonde.probe.guards import protected, quiet

_INNER = "_clip_grads_with_norm_"


class ClipTap:
    """Collects id(param) -> factor; `take()` empties it."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._factors: dict[int, Any] = {}
        self._norm: tuple[Any, Any] | None = None
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self.on_error = on_error
        self._replace(clip_grad, _INNER, self._watch_norm)
        for module in (torch.nn.utils, clip_grad):
            self._replace(module, "clip_grad_value_", self._watch_value)

    def detach(self) -> None:
        """Put the originals back, unless somebody has replaced them again since."""
        for module, name, ours, original in self._replaced:
            if getattr(module, name, None) is ours:
                setattr(module, name, original)
        self._replaced.clear()
        self._factors.clear()

    def take(self) -> dict[int, Any]:
        factors, self._factors = self._factors, {}
        return factors

    def take_norm(self) -> tuple[Any, Any] | None:
        """(total norm before clipping, the limit) of the last clip by norm."""
        norm, self._norm = self._norm, None
        return norm

    def _replace(self, module: Any, name: str, watch: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(module, name, None)
        if original is None:
            return  # a torch that clips in another way: clipping is then simply not seen
        ours = functools.wraps(original)(watch(original))
        setattr(module, name, ours)
        self._replaced.append((module, name, ours, original))

    def _watch_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = protected(self._note_norm, self.on_error, "clip by norm")

        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
            result = original(parameters, max_norm, total_norm, *args, **kwargs)
            note(parameters, max_norm, total_norm)
            return result

        return clip

    def _watch_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        before = protected(self._note_before_value, self.on_error, "clip by value")
        after = protected(self._note_after_value, self.on_error, "clip by value")

        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
            norms: list[Any] = []
            before(parameters, norms)
            result = original(parameters, *args, **kwargs)
            after(parameters, norms)
            return result

        return clip

    def _note_norm(self, parameters: Any, max_norm: Any, total_norm: Any) -> None:
        with quiet():
            factor = torch.clamp(float(max_norm) / (total_norm.detach() + 1e-6), max=1.0)
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
        self._factors[id(parameter)] = self._factors.get(id(parameter), 1.0) * factor


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else parameters


def _norms(parameters: Any) -> list[tuple[Tensor, Tensor]]:
    having = [(p, p.grad) for p in _listed(parameters) if p.grad is not None and p.grad.layout is torch.strided]
    norms = torch._foreach_norm([grad for _, grad in having]) if having else ()
    return [(parameter, norm) for (parameter, _), norm in zip(having, norms, strict=True)]
