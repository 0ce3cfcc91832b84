"""Activations and their gradients, from one global forward hook that knows the model's modules by weak reference."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook

from sonde.probe.guards import is_in_backward, is_in_checkpoint, is_observable, protected, quiet
from sonde.probe.model import ModelNames, ModuleRef
from sonde.probe.outputs import floating_tensors


class ForwardSink(Protocol):
    """Receives activations."""

    wants_activations: bool
    wants_activation_grads: bool

    @property
    def is_idle(self) -> bool:
        """Whether nothing is wanted from the modules that run now: checked at each call of each of them."""

    def forward_seen(self, place: ModuleRef, output: Any) -> None:
        """A module of the model ran in a training forward pass and returned this."""

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        """A selected module of the model, or the model itself, ran with these inputs and outputs."""

    def activation(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        """A tensor that a module returned."""

    def activation_grad(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        """The gradient with respect to it."""


_attached: list[ForwardTap] = []
_filters: list[Any] = []


def _silence_compile_warning(tap: ForwardTap) -> None:
    """torch warns that a global hook also fires for a compiled wrapper, which is what we want; under `-W error` that
    warning would end the user's training. One filter serves all taps.
    """
    _attached.append(tap)
    message = "Using `torch.compile(module)` when there are global hooks"
    warnings.filterwarnings("ignore", message=re.escape(message), category=UserWarning)
    _filters[:] = [warnings.filters[0]]


def _restore_compile_warning(tap: ForwardTap) -> None:
    if tap in _attached:
        _attached.remove(tap)
    if not _attached:
        for item in [f for f in _filters if f in warnings.filters]:
            warnings.filters.remove(item)  # type: ignore[attr-defined]
        _filters.clear()


class ForwardTap:
    """Sees every module call of the watched model, and of no other model."""

    def __init__(
        self,
        names: ModelNames,
        sink: ForwardSink,
        on_error: Callable[[str, Exception], None],
        on_root: Callable[[Any, Any, Any], None] | None = None,
        on_evaluated: Callable[[Any, Any, Any], None] | None = None,
        on_number: Callable[[nn.Module, Any, Tensor], None] | None = None,
        on_recomputed: Callable[[ModuleRef, Any], None] | None = None,
    ) -> None:
        self.names, self.sink, self.on_error = names, sink, on_error
        self.on_root = on_root
        """Called with (args, kwargs, output) of each training call of the model itself."""
        self.on_evaluated = on_evaluated
        """Called with the same for its calls without gradients."""
        self.on_number = on_number
        """Called with (module, args, output) of each call of a module outside the model that returns a single
        number."""
        self.on_recomputed = on_recomputed
        """Called with (place, output) of each module that a backward pass runs again, in a checkpointed segment."""
        model = names.model()
        self._root = names.place(model) if model is not None else None
        self._is_attached = True
        self._running_in = 0
        """The thread in which the model itself is running, or 0."""
        self._others: set[int] = set()
        """Threads that called it meanwhile. Their passes are not measured: they would be mixed with the first."""
        self._num_unknown = 0
        self._look_at = 1
        self._instead: Callable[[ModuleRef, Any], None] | None = None
        self._instead_in = 0
        self._gone_back = protected(self._grad_seen, on_error, "activation gradient hook")
        _silence_compile_warning(self)
        self._hook = protected(self._seen, on_error, "forward hook")
        self._handle: Any = None
        self.resume()

    def resume(self) -> None:
        """See module calls again."""
        if self._handle is None and self._is_attached:
            # Many models are called with keywords only: without them their inputs would not be seen.
            self._handle = register_module_forward_hook(self._hook, with_kwargs=True)

    def pause(self) -> None:
        """See no module call: an empty global hook alone takes more than a microsecond for each."""
        if self._handle is not None:
            self._handle.remove()
            # torch forgets to remove this mark, and continues as if there were a hook.
            getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(self._handle.id, None)
            self._handle = None

    def detach(self) -> None:
        self._is_attached = False
        self.pause()
        _restore_compile_warning(self)

    def entered(self) -> bool:
        """Called when the model itself is called. Returns whether to measure this pass."""
        here = threading.get_ident()
        if self._running_in not in (0, here) and self._is_running_elsewhere():
            self._others.add(here)
            return False
        self._others.discard(here)
        self._running_in = here
        return True

    @property
    def is_running(self) -> bool:
        """Whether the model itself has been called and has not returned, in any thread."""
        return self._running_in != 0

    def _is_running_elsewhere(self) -> bool:
        """Read from the frames of that thread, which may have ended or left the call by an exception."""
        model = self.names.model()
        frame: FrameType | None = sys._current_frames().get(self._running_in)
        while frame is not None:
            if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is model:
                return True
            frame = frame.f_back
        return False

    def _seen(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        place = self.names.place(module)
        if place is None and self._running_in and self._running_in == threading.get_ident():
            place = self._look_again(module)
        if place is None:
            if self.on_number is not None and type(output) is Tensor:
                with quiet():  # a user's mode sees even a query of a tensor's shape
                    if output.dim() == 0:
                        self.on_number(module, args, output)
            return
        if self._others and threading.get_ident() in self._others:
            if place is self._root:
                self._others.discard(threading.get_ident())
            return
        if place is self._root:
            self._running_in = 0
        if self._instead is not None and self._instead_in == threading.get_ident():
            if place.is_selected:
                with quiet():
                    self._instead(place, output)
            return
        sink = self.sink
        if place.has_fired and sink.is_idle and place is not self._root:
            return
        if not is_observable() or not self._is_training_forward():
            if place is self._root and self.on_evaluated is not None:
                self.on_evaluated(args, kwargs, output)
            if self.on_recomputed is not None and is_in_backward() and torch.is_grad_enabled():
                with quiet():
                    self.on_recomputed(place, output)
            return
        place.has_fired = True
        sink.forward_seen(place, output)
        if place is self._root and self.on_root is not None:
            self.on_root(args, kwargs, output)
        if not place.is_selected and place is not self._root:
            return
        with quiet():
            sink.module_called(place, module, args, output)
            if not place.is_selected or not (sink.wants_activations or sink.wants_activation_grads):
                return
            found = floating_tensors(output)
            if not found and sink.wants_activations:
                place.is_unread = True
            for suffix, tensor in found:
                if sink.wants_activations:
                    sink.activation(place, suffix, tensor)
                # A hook on a leaf (a parameter, an input) would stay on it for ever; its gradient is not an
                # activation's.
                if sink.wants_activation_grads and tensor.grad_fn is not None:
                    self._follow_back(place, suffix, tensor)

    def _look_again(self, module: nn.Module) -> ModuleRef | None:
        """An unknown module that runs inside the model may have replaced another. Modules created in every forward pass
        do not belong to the model: after each failed search, twice as many are ignored."""
        self._num_unknown += 1
        if self._num_unknown < self._look_at or not is_observable():
            return None
        self.names.refresh()
        place = self.names.place(module)
        self._look_at = self._num_unknown + 1 if place is not None else 2 * self._num_unknown
        return place

    @property
    def is_instead(self) -> bool:
        """Whether a pass of ours is running."""
        return self._instead is not None and self._instead_in == threading.get_ident()

    @contextmanager
    def instead(self, seen: Callable[[ModuleRef, Any], None]) -> Iterator[None]:
        """While a pass of ours runs, `seen` receives the outputs of selected modules, and nothing is recorded."""
        self._instead, self._instead_in = seen, threading.get_ident()
        try:
            yield
        finally:
            self._instead = None

    def _is_training_forward(self) -> bool:
        """The tensors for which `is_observable` is true."""
        if torch.is_grad_enabled():
            return True
        model = self.names.model()
        return model is not None and model.training and is_in_checkpoint()

    def _follow_back(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        """A tensor hook, never a full backward hook: that one breaks models with in-place operations."""
        hook = partial(self._gone_back, place, suffix)
        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # or saving the tensor would warn
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _grad_seen(self, place: ModuleRef, suffix: str, grad: Tensor) -> None:
        if self._is_attached and type(grad) is Tensor:
            with quiet():
                self.sink.activation_grad(place, suffix, grad)
