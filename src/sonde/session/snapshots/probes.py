"""Runs a fixed batch through the current model, to record how its layers respond. The model is left unchanged.

Runs in evaluation mode, without gradients and without compiled code; parameters, buffers, modes, gradients and random
generators are restored. It takes the time of a forward pass.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sonde.probe.outputs import floating_tensors
from sonde.probe.preserve import preserved
from sonde.session.snapshots.gather import root_of

Seen = Callable[[Any, str, Tensor], None]
"""(place, suffix, tensor)."""


class Probe:
    """The batch, copied when it was passed in: it stays the same whatever happens to the original."""

    def __init__(self, batch: Any) -> None:
        self._args, self._kwargs = _arguments(batch)
        self._args, self._kwargs = _copied(self._args), _copied(self._kwargs)

    def run(self, watching: Any, seen: Seen) -> None:
        """Call `seen` with each tensor that a module of the model returns."""
        model = watching.names.model()
        if model is None:
            return
        device = next((p.device for p in model.parameters()), None)
        # Kept on the model's device: moving it each time would block the host.
        args, kwargs = self._args, self._kwargs = _moved(self._args, device), _moved(self._kwargs, device)

        def outputs(place: Any, output: Any) -> None:
            for suffix, tensor in floating_tensors(output):
                seen(place, suffix, tensor)

        root = root_of(model)
        with ExitStack() as stack:
            stack.enter_context(preserved(root, training=False))
            stack.enter_context(torch.no_grad())
            # A model's warnings about a pass without gradients are not new, and are errors under `-W error`.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_eager())
            stack.enter_context(watching.forward.instead(outputs))
            output = root(*args, **kwargs)
            if watching.names.place(root) is None:  # it is named after its wrapper, which was not called
                outputs(watching.names.place(model), output)


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


def _eager() -> Any:
    """Run compiled parts uncompiled: another mode would be recompiled, and counted against the limit."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")
    return _Nothing()


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _copied(value: Any) -> Any:
    return _mapped(value, lambda tensor: tensor.detach().clone())


def _moved(value: Any, device: torch.device | None) -> Any:
    return _mapped(value, lambda tensor: tensor if device is None else tensor.to(device))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, change) for item in value)
    return value
