"""The names under which optimizer scalars are recorded: `optim`, `optim/1`, `optim/2`."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from sonde.probe.model import ModelNames


class OptimizerNames:
    """Shared by all models of a session: two optimizers get two names, and one that trains two models has one."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        """Keyed by model and by the optimizer's number within its model."""
        self._known: WeakKeyDictionary[Optimizer, _Place] = WeakKeyDictionary()

    def expect(self, model: ModelNames, named: list[Optimizer]) -> None:
        """Number the optimizers passed to `watch` in that order, whichever of them steps first."""
        for number, optimizer in enumerate(named):
            self.number(model, number, optimizer)
        if not named:
            self._numbers.setdefault((_key(model), 0), self._free())

    def number(self, model: ModelNames, number: int, optimizer: Optimizer | None) -> int:
        """The run-wide number of the optimizer with this number in its model; for None, the reserved one."""
        key = (_key(model), number)
        place = self._known.get(optimizer) if optimizer is not None else None
        if place is None:
            found = self._numbers.get(key)
            if found is None or self._is_used_elsewhere(found, key[0]):
                found = self._free()
            place = _Place(found, key[0])
        if optimizer is not None:
            self._known.setdefault(optimizer, place)
        self._numbers[key] = place.number
        return place.number

    def of(self, model: ModelNames, number: int, optimizer: Optimizer | None) -> str:
        known = self.number(model, number, optimizer)
        return f"optim/{known}" if known else "optim"

    def _is_used_elsewhere(self, number: int, model: str) -> bool:
        """Handle two models that share an optimizer when the other model has given this number to its next one."""
        return any(place.number == number and place.model != model for place in self._known.values())

    def _free(self) -> int:
        taken = {*self._numbers.values(), *(place.number for place in self._known.values())}
        return next(number for number in range(len(taken) + 1) if number not in taken)


class _Place(NamedTuple):
    number: int
    model: str
    """The key of the model that the optimizer was first seen with."""


def _key(model: ModelNames) -> str:
    """The key stays the same when a model is watched again: no two watched models share a parameter name."""
    return next((named.name for named in model.parameters.values()), model.prefix)
