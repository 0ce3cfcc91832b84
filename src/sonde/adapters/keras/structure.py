"""The structure of a Keras model as plain words and numbers: layers, variables, optimizer. Reads no values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras

from sonde.adapters.keras.names import KerasNames
from sonde.schema.frameworks.layouts import kind_of_layer

_RECTIFIERS: Final = (keras.activations.relu, keras.activations.relu6)
_OTHER_NAMES: Final = {"learning_rate": "lr", "epsilon": "eps", "beta_1": "beta1", "beta_2": "beta2"}
"""Keras names of some hyperparameters, and their names in the document."""
_CONSTANTS: Final = (
    *("weight_decay", "momentum", "beta_1", "beta_2", "epsilon", "rho", "clipnorm", "global_clipnorm", "clipvalue"),
    *("ema_momentum", "loss_scale_factor", "l1_regularization_strength", "l2_regularization_strength", "beta"),
)


def describe(
    names: KerasNames,
    model: Any,
    optimizers: Sequence[tuple[Any, Mapping[str, Any]]],
    calls: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """The structure document. `optimizers` are parallel to their `settings_of`; `calls` is name -> (order of first
    call, number of calls) in one step."""
    parameters = [variable for layer, _ in names.layers for variable in layer._trainable_variables]
    parameters = list({id(variable): variable for variable in parameters}.values())
    groups = {
        id(variable): (number, place)
        for number, (optimizer, _) in enumerate(optimizers)
        for place, group in enumerate(_groups(optimizer))
        for variable in group
    }
    return {
        "framework": "keras",
        "modules": [_module(layer, name, calls) for layer, name in names.layers],
        "parameters": [_parameter(names, variable, groups.get(id(variable))) for variable in parameters],
        "optimizers": [_optimizer(number, *pair) for number, pair in enumerate(optimizers)],
        "loss": _loss_name(model),
        "unregistered": [],
        "total_parameters": sum(map(_size, parameters)),
        "trainable_parameters": sum(_size(variable) for variable in parameters if variable.trainable),
    }


def rectified_axis(layer: Any) -> int | None:
    """The dimension of the units in the output of a rectifier layer; None for other layers."""
    is_rectifier = isinstance(layer, keras.layers.ReLU) and not layer.negative_slope
    if not is_rectifier and getattr(layer, "activation", None) not in _RECTIFIERS:
        return None
    return 1 if getattr(layer, "data_format", None) == "channels_first" else -1


def _module(layer: Any, name: str, calls: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    order, count = calls.get(name, (-1, 0))
    is_leaf = not layer._layers
    kind = kind_of_layer(type(layer).__name__)
    found = {
        "name": name,
        "type": type(layer).__name__,
        "kind": kind if kind != "other" or is_leaf else "container",
        "order": order,
        "calls": count,
        "is_leaf": is_leaf,
    }
    activation = getattr(layer, "activation", None)
    if activation is not None and activation is not keras.activations.linear:
        found["activation"] = str(getattr(activation, "__name__", type(activation).__name__))
    rate = getattr(layer, "rate", None)
    if found["kind"] == "dropout" and isinstance(rate, int | float):
        found["p"] = float(rate)
    return found


def _parameter(names: KerasNames, variable: Any, group: tuple[int, int] | None) -> dict[str, Any]:
    site = names.site_of("param", variable)
    return {
        "name": site.name,
        "shape": list(site.shape or ()),
        "dtype": site.dtype,
        "trainable": bool(variable.trainable),
        "owner": site.owner,
        "module_type": site.module_type,
        "in_optimizer": group is not None,
        "optimizer": -1 if group is None else group[0],
        "group": -1 if group is None else group[1],
        "fan_in": _fan_in(tuple(site.shape or ()), site.module_type),
        "aliases": [],
    }


def _fan_in(shape: tuple[int, ...], layer: str) -> int:
    """The number of inputs that are summed into one output; 0 if nothing is summed, or if it is unknown."""
    if len(shape) < 2 or kind_of_layer(layer) not in ("linear", "conv") or layer == "EinsumDense":
        return 0
    if layer.endswith("Transpose"):
        return math.prod(shape[:-2]) * shape[-1]
    return math.prod(shape[:-2]) if layer.startswith("Depthwise") else math.prod(shape[:-1])


def _size(variable: Any) -> int:
    return math.prod(int(size) for size in variable.shape)


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Its numbers, before training starts: later its variables belong to a running step."""
    config = _inner(optimizer).get_config()
    group = {_OTHER_NAMES.get(key, key): value for key, value in config.items() if _is_plain(value)}
    if "beta1" in group and "beta2" in group:
        group["betas"] = [group.pop("beta1"), group.pop("beta2")]
    return group


def constants_of(optimizer: Any) -> list[tuple[str, float]]:
    """Its current numbers that are not variables, by the names of their series."""
    attributes = [(key, vars(_inner(optimizer)).get(key)) for key in _CONSTANTS]
    return [(_OTHER_NAMES.get(key, key), value) for key, value in attributes if _is_plain(value)]


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _optimizer(number: int, optimizer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    groups = [{**settings, "num_params": len(group)} for group in _groups(optimizer)]
    for group in groups[1:]:
        group["weight_decay"] = 0.0
    return {"number": number, "type": type(_inner(optimizer)).__name__, "groups": groups}


def _groups(optimizer: Any) -> list[list[Any]]:
    """Its variables; those that `exclude_from_weight_decay` names are a second group."""
    inner, variables = _inner(optimizer), list(optimizer._trainable_variables)
    if not inner.weight_decay:
        return [variables]
    excluded = [variable for variable in variables if not inner._use_weight_decay(variable)]
    known = {id(variable) for variable in excluded}
    return [[v for v in variables if id(v) not in known], *([excluded] if excluded else [])]


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _loss_name(model: Any) -> str:
    loss = getattr(model, "loss", None)
    if isinstance(loss, str):
        return loss
    if loss is None or isinstance(loss, dict | list | tuple):
        return ""
    return str(getattr(loss, "__name__", type(loss).__name__))
