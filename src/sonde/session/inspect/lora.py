"""Low-rank adapters found by their shape: a frozen weight (out, in) next to trainable (r, in) and (out, r)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from sonde.probe.model import ModelNames, NamedParameter


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapted weight W + B A, by weak reference."""

    a_name: str
    b_name: str
    a: weakref.ref[Tensor]
    b: weakref.ref[Tensor]
    base: weakref.ref[Tensor]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor] | None:
        found = self.a(), self.b(), self.base()
        return None if found[0] is None or found[1] is None or found[2] is None else (found[0], found[1], found[2])


def find_adapters(names: ModelNames) -> list[Adapter]:
    """Every adapter of the model. Two parameters belong together when they share the nearest parent module."""
    frozen: dict[str, list[tuple[NamedParameter, Tensor]]] = defaultdict(list)
    trainable: dict[str, list[tuple[NamedParameter, Tensor]]] = defaultdict(list)
    for named in names.parameters.values():
        parameter = named.ref()
        if parameter is None or parameter.ndim != 2:
            continue
        group = trainable if parameter.requires_grad else frozen
        for above in _above(named.name):
            group[above].append((named, parameter))
    found = []
    for above, bases in frozen.items():
        if len(bases) == 1:  # the smallest module with one frozen weight
            found += _pair(bases[0][1], trainable.get(above, []))
    return list({adapter.b_name: adapter for adapter in found}.values())


def _above(name: str) -> list[str]:
    """The parent modules of a parameter, up to three levels: `x.base.weight` and `x.lora_A.default.weight` meet in
    `x`."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts), max(len(parts) - 3, -1), -1)]


def _pair(base: Tensor, candidates: list[tuple[NamedParameter, Tensor]]) -> list[Adapter]:
    num_out, num_in = base.shape
    for a_name, a in candidates:
        for b_name, b in candidates:
            rank = a.shape[0]
            is_fitting = a.shape == (rank, num_in) and b.shape == (num_out, rank) and a is not b
            if is_fitting and rank < min(num_out, num_in):
                return [Adapter(a_name.name, b_name.name, weakref.ref(a), weakref.ref(b), weakref.ref(base))]
    return []
