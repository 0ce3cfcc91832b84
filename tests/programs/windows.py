"""Windows made by hand, for tests of rules: a model in a few words, a loss, and the numbers that matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sonde.schema.names import Series
from sonde.schema.sketch import Array
from sonde.schema.window import Column, Window

_KINDS = {
    "Linear": "linear", "Conv2d": "conv", "LayerNorm": "norm", "BatchNorm1d": "norm", "Embedding": "embedding",
    "Dropout": "dropout", "Softmax": "softmax", "MultiheadAttention": "attention",
}  # fmt: skip


def stack(*layers: str, fed_by: Mapping[str, str] | None = None, lr: float = 0.1) -> dict[str, Any]:
    """The structure document of layers in a row, named by their place: `stack("Linear 20 64", "ReLU", "Linear 64 5")`.

    >>> stack("Linear 20 64", "ReLU")["parameters"][0]["shape"]
    [64, 20]
    """
    modules, parameters = [], []
    for place, layer in enumerate(layers):
        kind, *sizes = layer.split()
        name = str(place)
        modules.append({
            "name": name, "type": kind, "kind": _KINDS.get(kind, "activation"), "order": place, "calls": 1,
            "is_leaf": True, **({"fed_by": fed_by[name]} if fed_by and name in fed_by else {}),
        })  # fmt: skip
        if sizes:
            wide, narrow, *kernel = map(int, sizes)
            parameters.append({
                "name": f"{name}.weight", "shape": [narrow, wide, *kernel], "dtype": "float32", "trainable": True,
                "owner": name, "module_type": kind, "in_optimizer": True, "group": 0,
                "fan_in": wide * int(np.prod(kernel or [1])), "aliases": [],
            })  # fmt: skip
    optimizers = [{"type": "SGD", "groups": [{"lr": lr}]}]
    return {"modules": modules, "parameters": parameters, "optimizers": optimizers, "loss": "cross_entropy"}


def falling(num_steps: int, start: float = 2.3, end: float = 0.1) -> Array:
    """A loss that is being learned."""
    return np.asarray(np.geomspace(start, end, num_steps))


def stuck(num_steps: int, level: float = 2.3) -> Array:
    """A loss that stays where guessing is, with the noise of batches."""
    return np.asarray(level + 0.01 * np.sin(np.arange(num_steps)))


def window(
    document: Mapping[str, Any], loss: Array, series: Mapping[str, object], facts: Mapping[str, Any] | None = None
) -> Window:
    """`series` are values over the steps of the loss, or single numbers that do not change."""
    steps = np.arange(len(loss))
    columns: dict[Series, Column] = {
        Series(*name.split("/")): (steps, np.broadcast_to(np.asarray(values, float), steps.shape).copy())
        for name, values in series.items()
    }
    return Window(columns, {"loss": (steps, loss)}, {"model": document, **(facts or {})})
