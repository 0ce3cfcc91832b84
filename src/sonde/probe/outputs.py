"""The tensors inside a module's output: tensors and simple subclasses of them, tuples, lists, dicts, dataclasses; other
types are ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from sonde.schema.names import site_name

_PLAIN: Final = (Tensor, Parameter)
_MAX_DEPTH: Final = 4
_MAX_TENSORS: Final = 32


def is_plain_tensor(value: object) -> bool:
    """Whether this is a real tensor with data: no FakeTensor, BatchedTensor, DTensor or other subclass, not on
    `meta`."""
    return type(value) in _PLAIN and not value.is_meta  # type: ignore[attr-defined]


def floating_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """(suffix, tensor) of the floating-point tensors; the first has no suffix, so it has the module's own name.

    >>> [suffix for suffix, _ in floating_tensors((torch.zeros(1), {"h": torch.zeros(1)}))]
    ['', ':1.h']
    """
    if type(output) is tuple and len(output) == 1 and type(output[0]) is Tensor:
        output = output[0]
    if type(output) is Tensor:  # nearly always
        return [("", output)] if _is_floating(output) and not output.is_meta else []
    found: list[tuple[str, Tensor]] = []
    for path, tensor in _walk(output, "", 0):
        found.append((f":{site_name(path)}" if found else "", tensor))
        if len(found) >= _MAX_TENSORS:
            break
    return found


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        tensor = _as_plain(value)
        if tensor is not None and _is_floating(tensor):
            yield path, tensor
        return
    if depth >= _MAX_DEPTH:
        return
    for key, item in items_of(value):
        yield from _walk(item, f"{path}.{key}" if path else str(key), depth + 1)


def _as_plain(value: Tensor) -> Tensor | None:
    """The tensor, or the plain tensor with the same data for a subclass that only adds Python methods, such as
    fastai's images. None for one without data, or whose data only the subclass itself understands."""
    if is_plain_tensor(value):
        return value
    has_data = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_lazy(value)
    if not has_data or isinstance(value, Parameter):
        return None
    with torch._C.DisableTorchFunctionSubclass():  # also reading an attribute would call the subclass
        return None if value.is_meta else value.as_subclass(Tensor)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _is_floating(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
