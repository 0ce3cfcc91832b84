"""Names of a Keras model's layers and variables: unique, and the same in every run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import keras

from sonde.schema.names import site_name
from sonde.schema.records import Site


class KerasNames:
    """Names of a model's layers and variables: the user's own names, and Keras's generated ones with a new count in
    each layer, so that the same model has the same names in every run."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.variables: dict[int, tuple[str, str, str]] = {}
        self._taken: set[str] = set()
        self._owners: dict[int, Any] = {}
        """The layer of each variable."""
        self.layers = [(model, "model"), *self._walk(model, "", {id(model)})]

    def states(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, variable and layer of every variable, also of those that no optimizer trains: statistics of norms, and
        the states of random numbers."""
        for layer, path in self.layers:
            prefix = "" if layer is self._model else f"{path}."
            more = [*layer._non_trainable_variables, *(generator.state for generator in layer._seed_generators)]
            for variable in (*layer._trainable_variables, *more):
                if id(variable) not in self.variables:
                    name = prefix + variable.name.replace("/", ".")
                    self._add(variable, name, prefix[:-1], type(layer).__name__)
                self._owners.setdefault(id(variable), layer)
        for variable in (*self._model.trainable_variables, *self._model.non_trainable_variables):
            yield self.site_of("param", variable).name, variable, self._owners.get(id(variable))

    def owner_of(self, variable: Any) -> Any:
        """The layer of a variable, as far as `states` has found it."""
        return self._owners.get(id(variable))

    def site_of(self, kind: str, variable: Any, ending: str = "") -> Site:
        if id(variable) not in self.variables:  # created when the model was first called
            list(self._walk(self._model, "", {id(self._model)}))
        name, owner, layer = self.variables.get(id(variable)) or self._add(variable, variable.path.replace("/", "."))
        shape = tuple(int(size) for size in variable.shape)
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return Site(kind=kind, name=name + ending, shape=shape, dtype=dtype, owner=owner, module_type=layer)

    def _walk(self, layer: Any, prefix: str, seen: set[int]) -> Iterator[tuple[Any, str]]:
        for variable in layer._trainable_variables:
            if id(variable) not in self.variables:
                self._add(variable, prefix + variable.name.replace("/", "."), prefix[:-1], type(layer).__name__)
        for child, name in _children(layer):
            if id(child) in seen or isinstance(child, keras.layers.InputLayer):
                continue
            seen.add(id(child))
            yield child, prefix + name
            yield from self._walk(child, f"{prefix}{name}.", seen)

    def _add(self, variable: Any, name: str, owner: str = "", layer: str = "") -> tuple[str, str, str]:
        name, unique = site_name(name), ""
        while name + unique in self._taken:
            unique = f"_{int(unique[1:] or 0) + 1}"
        self._taken.add(name + unique)
        self.variables[id(variable)] = (name + unique, owner, layer)
        return self.variables[id(variable)]


def _children(layer: Any) -> Iterator[tuple[Any, str]]:
    counts: dict[str, int] = {}
    for child in layer._layers:
        made_up = _snake(type(child).__name__)
        is_made_up = re.fullmatch(rf"{re.escape(made_up)}(_\d+)?", child.name)
        base = site_name((made_up if is_made_up else child.name).replace("/", "."))
        num = counts[base] = counts.get(base, -1) + 1
        yield child, base if num == 0 else f"{base}_{num}"


def _snake(name: str) -> str:
    """The name that Keras derives from a layer's class."""
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
