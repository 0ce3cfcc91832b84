"""Checks whether successive gradients point the same way, from a small strided sample that stays on its device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

MAX_PARAMETERS: Final = 8
MAX_ELEMENTS: Final = 4096
RUN: Final = 16


class GradientDirection:
    """Called at successive optimizer steps with the same parameters; takes about thirty microseconds."""

    __slots__ = ("_before", "_chosen", "_grads", "_key", "_square")

    def __init__(self) -> None:
        self._chosen: list[weakref.ref[Tensor]] = []
        self._key: tuple[int, ...] = ()
        self._before: Tensor | None = None
        self._square: Tensor | None = None
        self._grads: list[weakref.ref[Tensor]] = []

    def choose(self, parameters: Sequence[Tensor]) -> None:
        """Choose at most eight evenly spaced parameters."""
        wanted = [p for p in parameters if p.requires_grad]
        step = -(-len(wanted) // MAX_PARAMETERS) or 1
        self._chosen = [weakref.ref(p) for p in wanted[::step]]
        self._before = None

    def forget(self) -> None:
        """The next gradient is compared with none."""
        self._before, self._grads = None, []

    def compare(self) -> tuple[Tensor | None, bool | None]:
        """(cosine to the gradient of the previous step, whether the gradients are still the same objects)."""
        grads = [p.grad for ref in self._chosen if (p := ref()) is not None]
        usable = [g for g in grads if g is not None and type(g) is Tensor and g.layout is torch.strided and g.numel()]
        if not usable or len({g.device for g in usable}) > 1:
            self.forget()
            return None, None
        is_same = self._are_kept(usable)
        self._grads = [weakref.ref(g) for g in usable]
        share = MAX_ELEMENTS // len(usable)
        key = tuple(g.numel() for g in usable)
        now = _sample(usable, share)
        square = now.dot(now)
        before, square_before = self._before, self._square
        comparable = before is not None and key == self._key and before.device == now.device
        self._before, self._square, self._key = now, square, key
        if not comparable or before is None or square_before is None:
            return None, is_same
        # One root per number: the product of two squares would overflow float32 for merely large gradients.
        return now.dot(before) / (square.sqrt() * square_before.sqrt()), is_same

    def _are_kept(self, grads: list[Tensor]) -> bool | None:
        if len(grads) != len(self._grads):
            return None
        return all(ref() is grad for ref, grad in zip(self._grads, grads, strict=True))


def _sample(grads: list[Tensor], size: int) -> Tensor:
    """At most `size` elements of each: short runs of neighbours, evenly spaced.

    Runs, because each isolated element costs a cache miss; few operations, because this runs at every step.
    """
    small, runs = [], []
    for grad in grads:
        if grad.is_complex():
            grad = torch.view_as_real(grad.resolve_conj())  # as optimizers do; a cast would lose one half
        if grad.numel() <= size:
            small.append(grad.reshape(-1))
        elif _is_dense(grad):
            num_runs = size // RUN
            runs.append(torch.as_strided(grad, (num_runs, RUN), (grad.numel() // num_runs, 1)))
        else:
            small.append(grad.reshape(-1)[:: -(-grad.numel() // size)])
    return torch.cat([*small, torch.cat(runs).view(-1)] if runs else small).float()


def _is_dense(grad: Tensor) -> bool:
    """Whether its elements are one block of memory, in whatever order."""
    if grad.is_contiguous():
        return True
    return sum((n - 1) * stride for n, stride in zip(grad.shape, grad.stride(), strict=True)) + 1 == grad.numel()
