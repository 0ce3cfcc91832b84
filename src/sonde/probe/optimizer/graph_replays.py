"""Optimizer steps captured into a CUDA graph: each replay repeats them, and no hook is called.

`CUDAGraph.replay` is replaced in its class, but only after a step of a watched optimizer was captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from sonde.probe.guarded import attempt
from sonde.probe.replaced import Replaced


class GraphReplays:
    """Calls `on_made` with each captured optimizer, in order, after each replay of its graph."""

    def __init__(self, on_made: Callable[[Optimizer], None], on_error: Callable[[str, Exception], None]) -> None:
        self._on_made, self._on_error = on_made, on_error
        self._replaced: Replaced | None = None
        self._captured: list[weakref.ref[Optimizer]] = []
        """The optimizers of the graph that is being captured."""
        self._graphs: weakref.WeakKeyDictionary[Any, list[weakref.ref[Optimizer]]] = weakref.WeakKeyDictionary()

    def captured(self, optimizer: Optimizer) -> bool:
        """Note that a step of this optimizer is being captured. False: its replays cannot be followed."""
        if self._replaced is None:
            graph: Any = getattr(torch.cuda, "CUDAGraph", None)
            if not (hasattr(graph, "replay") and hasattr(graph, "capture_end")):
                return False
            self._replaced = Replaced()
            self._replaced.put(graph, "capture_end", self._watch_capture)
            self._replaced.put(graph, "replay", self._watch_replay)
        self._captured.append(weakref.ref(optimizer))
        return True

    def detach(self) -> None:
        if self._replaced is not None:
            self._replaced.restore()
            self._replaced = None
        self._graphs.clear()
        self._captured = []

    def _watch_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            captured, self._captured = self._captured, []
            result = original(graph, *args, **kwargs)
            with attempt(self._on_error, "CUDA graph capture"):
                if captured:
                    self._graphs[graph] = captured
            return result

        return capture_end

    def _watch_replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            with attempt(self._on_error, "CUDA graph replay"):
                for ref in self._graphs.get(graph, ()):
                    optimizer = ref()
                    if optimizer is not None:
                        self._on_made(optimizer)
            return result

        return replay
