"""Low-rank adapters of a model: a frozen weight W (out, in) and two small trained ones, A (r, in) and B (out, r)."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.diagnose.measures.structure import Parameter, structure
from sonde.schema.window import Window


@dataclass(frozen=True, slots=True)
class Adapter:
    """Names of the three parameters, and of the module that adds the adapter to what it adapts."""

    module: str
    a: str
    b: str
    base: str
    base_module: str
    rank: int
    width: int
    """The smaller side of the weight: what the rank could be at most."""


def adapters(window: Window) -> list[Adapter]:
    """Found by their shapes, so that it does not matter what they are called."""
    if "adapters" not in window.notes:
        window.notes["adapters"] = _adapters(window)
    known: list[Adapter] = window.notes["adapters"]
    return known


def _adapters(window: Window) -> list[Adapter]:
    matrices = [p for p in structure(window).parameters if len(p.shape) == 2 and "Embedding" not in p.module_type]
    trained: dict[str, list[Parameter]] = {}
    for parameter in matrices:
        if parameter.trainable:
            for module in _above(parameter.name):
                trained.setdefault(module, []).append(parameter)
    found: list[Adapter] = []
    taken: set[str] = set()
    for base in matrices:
        if base.trainable:
            continue
        # The nearest module that holds a fitting pair: two up in a plain LoRA, three in PEFT's.
        for module in _above(base.name)[:4]:
            pair = _pair(base, [p for p in trained.get(module, ()) if p.name not in taken])
            if pair is not None:
                a, b = pair
                taken.update((a.name, b.name))
                found.append(Adapter(module, a.name, b.name, base.name, base.owner, a.shape[0], min(base.shape)))
                break
    return found


def _above(name: str) -> list[str]:
    """Modules that hold a parameter, the innermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]


def _pair(base: Parameter, trained: list[Parameter]) -> tuple[Parameter, Parameter] | None:
    """A and B beside a frozen weight; a module that trains anything else of that kind is no adapter."""
    if len(trained) != 2:
        return None
    out, fan_in = base.shape
    for a, b in (trained, trained[::-1]):
        rank = a.shape[0]
        if a.shape == (rank, fan_in) and b.shape == (out, rank) and rank <= max(out, fan_in):
            return a, b
    return None
