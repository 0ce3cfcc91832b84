"""State dictionaries as JSON, with their tensors stored separately. Reading builds values and never calls anything
named in it.

    {"lr": 0.1, "betas": (0.9, 0.99)}   ->   {"lr": 0.1, "betas": {"$": "tuple", "items": [0.9, 0.99]}}

Finite floats are written so that they are read back bit by bit. A subclass of int, float or str is read back as its
base.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.errors import CorruptError, UsageError

_TAG: Final = "$"
_DTYPES: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Encoder:
    """Turns values into JSON and collects their tensors; the same tensor twice is kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []  # an id is only unique while its object lives

    def encode(self, value: Any, path: str) -> Any:
        """`path` names the tensors, and the place in an error."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, str):
            return str(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
        if isinstance(value, Tensor):
            return {_TAG: "tensor", "name": self._keep(value, path)}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list):
            return [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
        return self._rarer(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        is_plain = type(value) is not Counter and all(type(key) is str for key in value) and _TAG not in value
        if is_plain:
            return {key: self.encode(item, f"{path}.{key}" if path else key) for key, item in value.items()}
        pairs = [[self.encode(key, path), self.encode(item, f"{path}.{key}")] for key, item in value.items()]
        return {_TAG: "counter" if isinstance(value, Counter) else "dict", "items": pairs}

    def _rarer(self, value: Any, path: str) -> Any:
        if isinstance(value, deque):
            return {_TAG: "deque", "items": self.encode(list(value), path), "maxlen": value.maxlen}
        for kind, type_ in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
            if isinstance(value, type_):
                return {_TAG: kind, "items": self.encode(list(value), path)}
        if isinstance(value, bytes | bytearray):
            return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {_TAG: "dtype", "value": str(value)}
        if isinstance(value, torch.device):
            return {_TAG: "device", "value": str(value)}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return _array(np.asarray(value))
        raise UsageError(
            f'"{path}" is a {type(value).__name__}, which a checkpoint cannot store: it holds tensors, arrays, '
            "numbers, strings and containers of them, and never pickles. Leave it out of the object's state_dict()."
        )

    def _keep(self, tensor: Tensor, path: str) -> str:
        if id(tensor) not in self._names:
            name = path or "value"
            while name in self.tensors:
                name += "_"
            self.tensors[name] = tensor.detach()
            self._names[id(tensor)] = name
            self._alive.append(tensor)
        return self._names[id(tensor)]


def _array(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": data}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The encoded value; CorruptError for anything else."""
    try:
        return _decode(value, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CorruptError(f"cannot read the state of the checkpoint ({error!r}).") from error


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind = value[_TAG]
    if kind == "tensor":
        return tensors[value["name"]]
    if kind in ("dict", "counter"):
        pairs = {_decode(key, tensors): _decode(item, tensors) for key, item in value["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    if kind in ("tuple", "set", "frozenset", "deque"):
        items = _decode(value["items"], tensors)
        if kind == "deque":
            return deque(items, value["maxlen"])
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
    return _decode_plain(kind, value)


def _decode_plain(kind: str, value: Mapping[str, Any]) -> Any:
    text = value["value"]
    if kind == "float":
        return float(text)
    if kind == "bytes":
        return base64.b64decode(text, validate=True)
    if kind == "dtype":
        return _DTYPES[text]
    if kind == "device":
        return torch.device(text)
    if kind == "array":
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "biufc":
            raise ValueError(f"an array of {dtype}")
        return np.frombuffer(base64.b64decode(text, validate=True), dtype).reshape(value["shape"]).copy()
    raise ValueError(f"unknown value type {kind!r}")
