"""Detects graphs of earlier steps that are still in memory: each has a token, counted by weak reference."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

from torch import Tensor

GRAPHS: Final = 8
MIN_AGE: Final = 3
"""Steps after which nothing of an ordinary training step is left."""


class _Token:
    """A hook that does nothing. Only the graph holds it."""

    __slots__ = ("__weakref__",)
    __torch_unserializable__ = True  # otherwise saving the tensor it is attached to would warn

    def __call__(self, grad: Tensor) -> None:
        """Return the gradient unchanged."""


class GraphTokens:
    """Counts live graphs without keeping any alive."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, weakref.ref[_Token]]] = deque(maxlen=GRAPHS + MIN_AGE)

    def mark(self, step: int, output: Tensor) -> None:
        """Attach a token to the graph of this output; once per step is enough."""
        if output.grad_fn is None or (self._tokens and self._tokens[-1][0] == step):
            return
        token = _Token()
        output.register_hook(token)  # type: ignore[no-untyped-call]
        self._tokens.append((step, weakref.ref(token)))

    def count(self, step: int) -> tuple[int, int]:
        """(graphs alive, graphs marked) among the last eight marked at least three steps ago."""
        old = [ref for marked, ref in self._tokens if marked <= step - MIN_AGE][-GRAPHS:]
        return sum(ref() is not None for ref in old), len(old)

    def forget(self) -> None:
        self._tokens.clear()
