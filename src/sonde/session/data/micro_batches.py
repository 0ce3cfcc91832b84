"""Micro-batches whose gradients were cleared before the optimizer could use them.

A step that accumulates gradients needs those of all its micro-batches. Looks only at whether `.grad` exists, which
costs nothing and waits for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

from torch import Tensor

from sonde.probe.guards import quiet

MAX_PARAMETERS: Final = 4
"""Number of parameters whose gradients are followed: `zero_grad` clears all of them."""


class MicroBatches:
    """Counts the backward passes of a step, and those whose gradients were cleared.

    A second pass over the same batch does not count (sharpness-aware optimizers, gradients of two losses), and
    neither is one after which some optimizer has made a step (the other model of a GAN).
    """

    def __init__(self, num_optimizer_calls: Callable[[], int]) -> None:
        self.num = self.num_cleared = 0
        self._num_optimizer_calls = num_optimizer_calls
        self._calls_before = 0
        self._parameters: list[weakref.ref[Any]] = []
        self._input: weakref.ref[Tensor] | None = None
        self._trained_input: weakref.ref[Tensor] | None = None

    def model_called(self, x: Tensor | None) -> None:
        self._input = None if x is None else weakref.ref(x)

    def backward_begins(self) -> None:
        calls, x, last = self._num_optimizer_calls(), self._input, self._trained_input
        if self.num and x is not None and last is not None and calls == self._calls_before:
            is_same = x() is not None and x() is last()
            self.num_cleared += not is_same and self._is_cleared()
        self.num += 1
        self._calls_before, self._trained_input = calls, x

    def _is_cleared(self) -> bool:
        parameters = [parameter for ref in self._parameters if (parameter := ref()) is not None]
        with quiet():
            return bool(parameters) and all(parameter.grad is None for parameter in parameters)

    def update_begins(self, parameters: Iterable[Callable[[], Any]]) -> None:
        """Gradients are about to be used: follow some of the parameters that have one."""
        if self._is_cleared() or not self._parameters:
            alive = (parameter for ref in parameters if (parameter := ref()) is not None)
            with quiet():
                found = islice((parameter for parameter in alive if parameter.grad is not None), MAX_PARAMETERS)
                self._parameters = [weakref.ref(parameter) for parameter in found]

    def take(self) -> tuple[int, int]:
        """(backward passes, those whose gradients were cleared) since the last call."""
        found = self.num, self.num_cleared
        self.num = self.num_cleared = 0
        return found
