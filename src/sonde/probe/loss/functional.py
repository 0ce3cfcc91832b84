"""Activations and attention written as function calls: `F.relu(x)` inside a forward pass of the watched model.

Functions are replaced by name in torch's modules, only while an inspected forward pass runs: between two passes torch
is untouched, so nothing pickles, scripts or compiles our function instead of torch's. One replacement serves all taps.
The caller is found in the Python frames above: the innermost watched module.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Container
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from sonde.probe.guards import is_observable, protected, quiet
from sonde.probe.locks import ForkLock
from sonde.probe.model import ModelNames, ModuleRef
from sonde.probe.outputs import is_plain_tensor
from sonde.probe.replaced import Replaced


class CallSink(Protocol):
    """Receives function calls."""

    def function_called(
        self, name: str, place: ModuleRef, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """`name` is one of relu, clamp, tanh, sigmoid, softmax, attention, detach; the module at `place` called it."""


_taps: list[CallTap] = []
_replaced = Replaced()
_reported: set[str] = set()
"""The names of the functions that are replaced: those that an open tap asks for."""
_lock = ForkLock()
"""Models in several threads open and close their taps at the same time."""

# (where, its name there, what it is).
TARGETS: Final = (
    *(
        (holder, name, name)
        for name in ("relu", "tanh", "sigmoid", "softmax")
        for holder in (nn.functional, torch, Tensor)
    ),
    *((holder, "relu_", "relu") for holder in (nn.functional, torch, Tensor)),
    (nn.functional, "relu6", "relu"),
    *(
        (holder, name, "clamp")
        for name in ("clamp", "clip", "clamp_min", "clamp_", "clip_", "clamp_min_")
        for holder in (torch, Tensor)
    ),
    *((holder, "detach", "detach") for holder in (torch, Tensor)),
    (nn.functional, "scaled_dot_product_attention", "attention"),
)
ACTIVATIONS: Final = ("relu", "tanh", "sigmoid", "softmax", "attention")


class CallTap:
    """Reports function calls of one model to a sink. Nothing is replaced until `open`; `close` restores everything."""

    def __init__(
        self,
        names: ModelNames,
        sink: CallSink,
        on_error: Callable[[str, Exception], None],
        *,
        only: Container[str] | None = None,
    ) -> None:
        self.names, self.sink, self.only = names, sink, only
        self.is_open = False
        self.seen = protected(self._seen, on_error, "function call")

    def open(self) -> None:
        if self.is_open:
            return
        with _lock.held:
            new = {name for *_, name in TARGETS if self.only is None or name in self.only} - _reported
            _reported.update(new)
            try:
                for holder, attribute, name in TARGETS:
                    if name in new:
                        _replaced.put(holder, attribute, functools.partial(_watched, name))
            except BaseException:
                if not _taps:
                    self._restore()  # replacing half of torch is worse than seeing nothing
                raise
            _taps.append(self)
            self.is_open = True

    def close(self) -> None:
        if not self.is_open:
            return
        with _lock.held:
            self.is_open = False
            if self in _taps:
                _taps.remove(self)
                if not _taps:
                    self._restore()

    @staticmethod
    def _restore() -> None:
        _replaced.restore()
        _reported.clear()

    def _seen(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        with quiet():  # from here on: a user's mode sees even a query of a tensor's device
            if is_plain_tensor(out) and is_observable():
                place = self._caller()
                if place is not None and place.is_selected:
                    self.sink.function_called(name, place, args, kwargs, out)

    def _caller(self) -> ModuleRef | None:
        """The innermost watched module; a Softmax module counts as the one that holds it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_argcount and code.co_varnames[0] == "self":
                module = frame.f_locals.get("self")
                if isinstance(module, nn.Module) and not isinstance(module, nn.Softmax):
                    place = self.names.place(module)
                    if place is not None:
                        return place
            frame = frame.f_back
        return None


class _Depth(threading.local):
    """`F.relu` calls `torch.relu`: only the outermost of our functions reports."""

    value = 0


_depth = _Depth()


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _depth.value:
            return original(*args, **kwargs)
        _depth.value = 1
        try:
            out = original(*args, **kwargs)
            # Our own hooks detach, too; they run without gradients.
            for tap in tuple(_taps) if name != "detach" or torch.is_grad_enabled() else ():
                if tap.only is None or name in tap.only:
                    tap.seen(name, args, kwargs, out)
        finally:
            _depth.value = 0
        return out

    return call
