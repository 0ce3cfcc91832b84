"""Signal paths between layers: how much of its input a block passes on, and which linear layers feed each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sonde.probe.loss.feeding import Feeding
from sonde.probe.model import ModuleRef
from sonde.probe.outputs import floating_tensors
from sonde.probe.structure import kind_of
from sonde.reduce.inspect.units import skip_gain
from sonde.session.inspect.units import Values, readable


class PathInspection:
    """Fills `values`; `fed_by` is known after the first forward pass."""

    def __init__(self) -> None:
        self._feeding = Feeding()
        self._is_over = False

    @property
    def fed_by(self) -> dict[str, str]:
        return self._feeding.fed_by

    def begin(self) -> None:
        self._feeding.forget()

    def module_called(
        self, values: Values, place: ModuleRef, module: nn.Module, args: Any, output: Any, call: int
    ) -> None:
        if call:
            return
        given = args[0] if isinstance(args, tuple) and args else None
        if module._modules:
            self._skip_gain(values, place, given, output)
        elif not self._is_over and kind_of(module) in ("linear", "conv"):
            self._feeding.called(place.name, given, output)

    def forward_ended(self, output: Any) -> None:
        self._is_over = True
        self._feeding.end(tensor for _, tensor in floating_tensors(output))

    def _skip_gain(self, values: Values, place: ModuleRef, given: object, output: Any) -> None:
        outputs = floating_tensors(output)
        if not outputs or not isinstance(given, Tensor) or not readable(given):
            return
        out = outputs[0][1]
        if readable(out) and out.shape == given.shape and out.device == given.device and out.ndim >= 2:
            values[f"unit/{place.name}/skip_gain"] = skip_gain(given, out)
