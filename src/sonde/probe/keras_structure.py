"""What a Keras model is made of, in plain words and numbers: layers, variables, optimizer. Reads no values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras

from sonde.probe.keras_names import KerasNames
from sonde.schema.frameworks import kind_of_layer

_RECTIFIERS: Final = (keras.activations.relu, keras.activations.relu6)
_GROUP_KEYS: Final = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
    "nesterov": "nesterov",
    "amsgrad": "amsgrad",
}
"""What Keras calls the numbers of an optimizer, and what the document does."""


def describe(
    names: KerasNames,
    model: Any,
    optimizers: Sequence[tuple[Any, Mapping[str, Any]]],
    calls: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """The structure document. `optimizers` stand beside their `settings_of`; `calls` is name -> (order of first call,
    number of calls) in one step."""
    parameters = [variable for layer, _ in names.layers for variable in layer._trainable_variables]
    parameters = list({id(variable): variable for variable in parameters}.values())
    optimized = {id(v) for optimizer, _ in optimizers for v in optimizer._trainable_variables}
    return {
        "framework": "keras",
        "modules": [_module(layer, name, calls) for layer, name in names.layers],
        "parameters": [_parameter(names, variable, optimized) for variable in parameters],
        "optimizers": [_optimizer(*pair) for pair in optimizers],
        "loss": _loss_name(model),
        "unregistered": [],
        "total_parameters": sum(map(_size, parameters)),
        "trainable_parameters": sum(_size(variable) for variable in parameters if variable.trainable),
    }


def rectified_axis(layer: Any) -> int | None:
    """Which dimension of a layer's output its units are, where it is a rectifier's; None for other layers."""
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


def _parameter(names: KerasNames, variable: Any, optimized: set[int]) -> dict[str, Any]:
    site = names.site_of("param", variable)
    is_optimized = id(variable) in optimized
    return {
        "name": site.name,
        "shape": list(site.shape or ()),
        "dtype": site.dtype,
        "trainable": bool(variable.trainable),
        "owner": site.owner,
        "module_type": site.module_type,
        "in_optimizer": is_optimized,
        "group": 0 if is_optimized else -1,
        "fan_in": _fan_in(tuple(site.shape or ()), site.module_type),
        "aliases": [],
    }


def _fan_in(shape: tuple[int, ...], layer: str) -> int:
    """How many inputs add up to one output; 0 where nothing is added up, or nobody can tell."""
    if len(shape) < 2 or kind_of_layer(layer) not in ("linear", "conv") or layer == "EinsumDense":
        return 0
    if layer.endswith("Transpose"):
        return math.prod(shape[:-2]) * shape[-1]
    return math.prod(shape[:-2]) if layer.startswith("Depthwise") else math.prod(shape[:-1])


def _size(variable: Any) -> int:
    return math.prod(int(size) for size in variable.shape)


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Its numbers, before training begins: later its variables are those of a step that runs."""
    config = getattr(optimizer, "inner_optimizer", optimizer).get_config()
    group: dict[str, Any] = {ours: config[key] for key, ours in _GROUP_KEYS.items() if _is_plain(config.get(key))}
    if _is_plain(config.get("beta_1")) and _is_plain(config.get("beta_2")):
        group["betas"] = [config["beta_1"], config["beta_2"]]
    return group


def _optimizer(optimizer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return {"type": type(inner).__name__, "groups": [{**settings, "num_params": len(optimizer._trainable_variables)}]}


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _loss_name(model: Any) -> str:
    loss = getattr(model, "loss", None)
    if isinstance(loss, str):
        return loss
    if loss is None or isinstance(loss, dict | list | tuple):
        return ""
    return str(getattr(loss, "__name__", type(loss).__name__))
