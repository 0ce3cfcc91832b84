"""The names under which the numbers of optimizers are recorded: `optim`, `optim/1`, `optim/2`."""

from __future__ import annotations

from sonde.probe.model import ModelNames


class OptimizerNames:
    """One for all models of a session: two models with one optimizer each have two names."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}

    def expect(self, model: ModelNames, num_named: int) -> None:
        """Number the optimizers named in `watch` in that order, whichever of them steps first."""
        for number in range(max(num_named, 1)):
            self.number(model, number)

    def number(self, model: ModelNames, number: int) -> int:
        """Of the optimizer with this number among those of its model."""
        return self._numbers.setdefault((_key(model), number), len(self._numbers))

    def of(self, model: ModelNames, number: int) -> str:
        known = self.number(model, number)
        return f"optim/{known}" if known else "optim"


def _key(model: ModelNames) -> str:
    """The same for a model that is watched again: no two watched models share the name of a parameter."""
    return next((named.name for named in model.parameters.values()), model.prefix)
