"""Gradients by time step and by gate, from one pass; a module that is called once per step counts as a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sonde.flow.model_index import ModelIndex
from sonde.probe.model import ModuleRef
from sonde.reduce.dense import work_dtype

GATES: Final = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new"), "RNN": ("hidden",)}


class TimeWatch:
    """Gradients by time step, during one analysis."""

    def __init__(self, anatomy: ModelIndex, min_steps: int) -> None:
        self.min_steps = min_steps
        self.names, self.modules = anatomy.names, anatomy.modules
        self.types: dict[str, str] = {}
        self._gates: dict[str, tuple[tuple[str, ...], dict[str, list[Tensor]]]] = {}
        self._sequences: dict[str, Tensor] = {}
        self._calls: dict[str, list[Tensor | None]] = {}

    @contextmanager
    def inputs_with_gradients(self) -> Iterator[None]:
        """Make the inputs of recurrent layers require a gradient if the data do not."""
        recurrent = [m for m in self.modules if _is_recurrent(m)]
        handles: list[Any] = [m.register_forward_pre_hook(self._before) for m in recurrent]
        for module in recurrent:
            handles += self._watch_gates(module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        place = self.names.place(module)
        if place is None or not args or not torch.is_grad_enabled():
            return None
        if isinstance(args[0], PackedSequence) or not isinstance(args[0], Tensor):
            return None
        # A view of the user's tensor: a hook on the tensor itself would stay on it.
        x = args[0].view_as(args[0]) if args[0].requires_grad else args[0].detach().clone().requires_grad_(True)
        self.types[place.name] = type(module).__name__
        x.register_hook(self._note_sequence(place.name, module))  # type: ignore[no-untyped-call]
        return (x, *args[1:])

    def _note_sequence(self, name: str, module: nn.Module) -> Callable[[Tensor], None]:
        def note(grad: Tensor) -> None:
            time_first = grad.detach().float()
            if getattr(module, "batch_first", False) and grad.ndim == 3:
                time_first = time_first.transpose(0, 1)
            norms = time_first.flatten(1).norm(dim=1)
            before = self._sequences.get(name)
            is_alike = before is not None and before.shape == norms.shape
            self._sequences[name] = torch.hypot(before, norms) if before is not None and is_alike else norms

        return note

    def _watch_gates(self, module: nn.Module) -> list[Any]:
        """Rows of a recurrent layer's weights belong to its gates, one block each."""
        place = self.names.place(module)
        if place is None:
            return []
        gates = _gates_of(module)
        num, found = len(gates), {"weight": list[Tensor](), "gradient": list[Tensor]()}
        self._gates[place.name] = gates, found
        handles = []
        for name, parameter in module.named_parameters(recurse=False):
            if name.startswith("weight") and "hr" not in name and parameter.requires_grad:
                found["weight"].append(_by_rows(parameter, num))
                note = partial(_add_rows, found["gradient"], num)
                handles.append(parameter.register_hook(note))  # type: ignore[no-untyped-call]
        return handles

    def gates(self) -> dict[str, dict[str, dict[str, float]]]:
        """Layer -> gate -> norm of weight, of gradient, and their ratio."""
        return {name: _gate_numbers(gates, found) for name, (gates, found) in self._gates.items()}

    def called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        """For a module that is called once per time step: the gradient of each of its outputs."""
        if _is_recurrent(module):
            return
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
            return
        self.types.setdefault(place.name, type(module).__name__)
        norms = self._calls.setdefault(place.name, [])
        index = len(norms)
        norms.append(None)

        def note(grad: Tensor) -> None:
            norms[index] = grad.detach().norm(dtype=work_dtype(grad))

        tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def profiles(self) -> dict[str, list[float]]:
        repeated = {
            name: [0.0 if norm is None else float(norm) for norm in norms]
            for name, norms in self._calls.items()
            if len(norms) >= self.min_steps or (self.types.get(name, "").endswith("Cell") and len(norms) > 1)
        }
        cells = {name: norms for name, norms in repeated.items() if self.types[name].endswith("Cell")}
        sequences = {name: norms.tolist() for name, norms in self._sequences.items()}
        return {**sequences, **(cells or ({} if self._sequences else repeated))}


def _is_recurrent(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase)


def _gates_of(module: nn.Module) -> tuple[str, ...]:
    kind = "LSTM" if isinstance(module, nn.LSTM) else "GRU" if isinstance(module, nn.GRU) else "RNN"
    return GATES[kind]


def _by_rows(tensor: Tensor, num_gates: int) -> Tensor:
    """(gates,) norm of each gate's block of rows."""
    norms: Tensor = tensor.detach().reshape(num_gates, -1).norm(dim=1, dtype=work_dtype(tensor))
    return norms


def _add_rows(found: list[Tensor], num_gates: int, grad: Tensor) -> None:
    found.append(_by_rows(grad, num_gates))


def _gate_numbers(names: Sequence[str], found: dict[str, list[Tensor]]) -> dict[str, dict[str, float]]:
    sizes = {
        key: torch.stack(parts).norm(dim=0).tolist() if parts else [0.0] * len(names) for key, parts in found.items()
    }
    return {
        gate: {"weight": w, "gradient": g, "ratio": g / w if w else 0.0}
        for gate, w, g in zip(names, sizes["weight"], sizes["gradient"], strict=True)
    }
