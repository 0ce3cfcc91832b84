"""Whether the graphs of earlier steps are still in memory: a token hangs on each, and is counted by weak reference."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

from torch import Tensor

GRAPHS: Final = 8
MIN_AGE: Final = 3
"""Steps after which nothing of an ordinary training step is left."""


class _Token:
    """A hook that does nothing. The graph holds it; nobody else does."""

    __slots__ = ("__weakref__",)
    __torch_unserializable__ = True  # or saving the tensor it hangs on would warn

    def __call__(self, grad: Tensor) -> None:
        """Leave the gradient as it is."""


class GraphTokens:
    """Keeps nothing alive itself."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, weakref.ref[_Token]]] = deque(maxlen=GRAPHS + MIN_AGE)

    def mark(self, step: int, output: Tensor) -> None:
        """Hang a token on the graph of this output; once a step is enough."""
        if output.grad_fn is None or (self._tokens and self._tokens[-1][0] == step):
            return
        token = _Token()
        output.register_hook(token)  # type: ignore[no-untyped-call]
        self._tokens.append((step, weakref.ref(token)))

    def count(self, step: int) -> tuple[int, int]:
        """(graphs alive, of how many) among the last eight marked at least three steps ago."""
        old = [ref for marked, ref in self._tokens if marked <= step - MIN_AGE][-GRAPHS:]
        return sum(ref() is not None for ref in old), len(old)

    def forget(self) -> None:
        self._tokens.clear()
