"""Kind `rnn`: how far back gradients reach, in torch's recurrent layers and in cells called in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.probe.guards import protected, quiet
from sonde.probe.model import ModuleRef
from sonde.probe.outputs import floating_tensors
from sonde.reduce.inspect.rnn import reach
from sonde.session.inspect.units import Values, readable

MIN_CALLS: Final = 8
"""A module called this often in one forward pass is taken for a recurrent cell."""


class RecurrenceInspection:
    """Fills `values`; keeps the number of calls in the last inspected forward pass."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._usual: dict[str, int] = {}
        self._now: dict[str, int] = {}
        self._squares: dict[tuple[str, str], Tensor] = {}

    def begin(self) -> None:
        self._now.clear()
        self._squares.clear()

    def layer_called(self, values: Values, place: ModuleRef, module: nn.RNNBase, args: Any) -> None:
        if not isinstance(args, tuple) or not args or not readable(args[0]):
            return  # packed sequences differ in length: there is no common last step
        traced = reach(module, args[0])
        if traced is not None:
            values[f"rnn/{place.name}/reach"], values[f"rnn/{place.name}/length"], profile = traced
            values |= {f"rnn/{place.name}/profile_{stop}": level for stop, level in enumerate(profile)}

    def cell_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any, call: int) -> None:
        """Follow the gradients of a loop's first and last output, once the length of the loop is known."""
        self._now[place.name] = call + 1
        usual = self._usual.get(place.name, 0)
        if usual < MIN_CALLS or call not in (0, usual - 1):
            return
        outputs = [tensor for _, tensor in floating_tensors(output) if tensor.grad_fn is not None]
        if outputs and _is_cell(module, args, outputs[0]):
            for tensor in outputs[:2]:  # an LSTM's state is two tensors
                self._follow(place.name, "last" if call else "first", tensor)

    def _follow(self, site: str, end: str, tensor: Tensor) -> None:
        squares = self._squares

        def seen(grad: Tensor) -> None:
            if type(grad) is Tensor and grad.layout is torch.strided:
                with quiet():
                    square = torch.linalg.vector_norm(grad.float()).square()
                    squares[site, end] = squares[site, end] + square if (site, end) in squares else square

        tensor.register_hook(  # type: ignore[no-untyped-call]
            protected(seen, self._on_error, "gradient of a recurrence")
        )

    def forward_ended(self) -> None:
        self._usual = dict(self._now)

    def finish(self, values: Values) -> None:
        """Called at the optimizer's step, when the backward pass is done."""
        for site, length in self._now.items():
            first, last = self._squares.get((site, "first")), self._squares.get((site, "last"))
            if first is not None and last is not None and length == self._usual.get(site):
                values[f"rnn/{site}/reach"] = (first / last).sqrt()
                values[f"rnn/{site}/length"] = length
        self._squares.clear()


def _is_cell(module: nn.Module, args: Any, output: Tensor) -> bool:
    """A cell takes a state and returns one of the same shape; activations, which have no weights, are not cells."""
    if isinstance(module, nn.RNNCellBase):
        return True
    if next(module.parameters(), None) is None:
        return False
    given = [tensor for _, tensor in floating_tensors(args)]
    return any(tensor.shape == output.shape for tensor in given)
