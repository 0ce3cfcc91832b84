"""Layers and parameters kept in plain lists, dicts or attributes, where `model.parameters()` does not find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn

MAX_ITEMS: Final = 256
_OWN: Final = ("_parameters", "_buffers", "_modules")
"""Where torch keeps what is registered."""


def unregistered(model: nn.Module) -> list[str]:
    """Where they are, and of what type: `blocks[0] (Linear)`. Frozen ones are left out: a teacher is hidden on purpose.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = [nn.Linear(2, 2)]
    >>> unregistered(Net())
    ['blocks[0] (Linear)']
    """
    known = {id(parameter) for parameter in model.parameters()}
    found = []
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute in _OWN or attribute.startswith("__"):
                continue
            path = f"{name}.{attribute}" if name else attribute
            found += [
                f"{path}{place} ({type(item).__name__})" for place, item in _items(value) if _is_lost(item, known)
            ]
    return found[:MAX_ITEMS]


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """What a plain container holds, or a tensor that stands alone. Modules that stand alone are always registered."""
    if isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value[:MAX_ITEMS]))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items())[:MAX_ITEMS])
    elif isinstance(value, Tensor):
        yield "", value


def _is_lost(item: Any, known: set[int]) -> bool:
    if isinstance(item, nn.Module):
        return any(parameter.requires_grad and id(parameter) not in known for parameter in item.parameters())
    return isinstance(item, Tensor) and item.requires_grad and item.is_leaf and id(item) not in known
