"""Which of an optimizer's parameters are the model's: looked up once, and again when one of them was replaced."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sonde.probe.model import ModelNames, NamedParameter
from sonde.probe.outputs import is_plain_tensor


class Roster:
    """One optimizer's. Holds no tensor; `keys` caches what the sink knows the parameters by."""

    def __init__(self, names: ModelNames, params: Sequence[Tensor]) -> None:
        self.names: list[NamedParameter] = []
        self.unreadable: list[tuple[NamedParameter, str]] = []
        self.keys: dict[tuple[str, str], Any] = {}
        self._version = names.version
        self._refs = [weakref.ref(parameter) for parameter in params]
        self._places: list[int] = []
        for place, parameter in enumerate(params):
            named = names.parameter(parameter)
            if named is None or not named.is_selected:
                continue
            if is_plain_tensor(parameter):
                self.names.append(named)
                self._places.append(place)
            else:
                self.unreadable.append((named, type(parameter).__name__))

    def fits(self, names: ModelNames, params: Sequence[Tensor]) -> bool:
        """Whether these are still the same parameters, under the same names."""
        return (
            self._version == names.version
            and len(self._refs) == len(params)
            and all(ref() is parameter for ref, parameter in zip(self._refs, params, strict=True))
        )

    def readable(self, params: list[Tensor]) -> list[Tensor]:
        """Those of `names`, of all that the optimizer has."""
        return params if len(self._places) == len(params) else [params[place] for place in self._places]
