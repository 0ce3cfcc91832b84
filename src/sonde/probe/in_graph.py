"""Activations inside a compiled region, on request: an operation of ours that the compiler keeps in its graph.

It is opt-in because it changes the compiled program: the observed value must be written to memory, so fusion ends
there, and half precision is rounded there. In bfloat16 the last bits of training may differ from a run without it. The
hooks are on the modules themselves, and must exist before the first compiled call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sonde.probe.forward import ForwardSink
from sonde.probe.guards import is_observable, quiet
from sonde.probe.model import ModelNames, ModuleRef

_receivers: dict[int, Callable[[Tensor], None]] = {}


@torch.library.custom_op("sonde::tap", mutates_args=("stamp",))
def tap(x: Tensor, stamp: Tensor, number: int) -> None:
    """Observe a tensor. It claims to modify `stamp`; otherwise the compiler would remove it as having no effect."""
    receiver = _receivers.get(number)
    if receiver is not None:
        receiver(x)


@tap.register_fake
def _(x: Tensor, stamp: Tensor, number: int) -> None:
    return None


class InGraphHook:
    """A forward hook that acts only while a compiler traces. A copy of the model has one that never does."""

    def __init__(self, stamp: Tensor | None, number: int) -> None:
        self.stamp, self.number = stamp, number

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stamp is not None and torch.compiler.is_compiling() and isinstance(output, Tensor):
            torch.ops.sonde.tap(output.detach(), self.stamp, self.number)

    def __deepcopy__(self, memo: Any) -> InGraphHook:
        return InGraphHook(None, -1)

    def __reduce__(self) -> tuple[type[InGraphHook], tuple[None, int]]:
        return InGraphHook, (None, -1)


class InGraphTaps:
    """Hooks on the selected leaf modules of a model."""

    def __init__(self, names: ModelNames, sink: ForwardSink, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._sink = weakref.ref(sink)
        self._numbers: list[int] = []
        self._handles: list[Any] = []
        stamps: dict[torch.device, Tensor] = {}
        for place in names.places.values():
            module = place.ref()
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks of this kind, and no compiler traces into it
            if module is not None and place.is_selected and not module._modules:
                device = _device_of(module, names)
                stamp = stamps.setdefault(device, torch.zeros(1, device=device))
                number = max(_receivers, default=-1) + 1
                _receivers[number] = self._receiver(place)
                self._numbers.append(number)
                self._handles.append(module.register_forward_hook(InGraphHook(stamp, number)))

    def detach(self) -> None:
        """The operations stay in the compiled program, and do nothing from now on."""
        for handle in self._handles:
            handle.remove()
        for number in self._numbers:
            _receivers.pop(number, None)

    def _receiver(self, place: ModuleRef) -> Callable[[Tensor], None]:
        def receive(x: Tensor) -> None:
            sink = self._sink()
            if sink is None or not is_observable():
                return
            place.has_fired = True
            try:
                sink.forward_seen(place, x)
                if sink.wants_activations and x.is_floating_point():
                    with quiet():
                        sink.activation(place, "", x)
            except Exception as error:  # noqa: BLE001 - our failure must not end their training
                self._on_error("operation in a compiled region", error)

        return receive


def _device_of(module: nn.Module, names: ModelNames) -> torch.device:
    own = next(module.parameters(), None)
    if own is None:
        model = names.model()
        own = next(model.parameters(), None) if model is not None else None
    return torch.device("cpu") if own is None else own.device
