"""The tensor that `backward()` is called on: the loss as it is trained, and the factors it was scaled by.

Reads a few nodes of the graph above the loss before the backward pass frees it. Saved tensors that a user's hook has
packed are left alone: unpacking would run the user's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sonde.probe.guards import is_observable, protected, quiet
from sonde.probe.loss.functions import FunctionTap
from sonde.probe.outputs import is_plain_tensor

ORIGIN: Final = "sonde.loss"
"""Key in the metadata of a graph node: the call that created it, see `mark`."""
_MAX_NODES: Final = 16
_MAX_FACTORS: Final = 3
_SCALING: Final = {"MulBackward0": False, "DivBackward0": True}
"""Nodes that multiply, and whether they divide."""
_PASSING: Final = frozenset(
    {
        "AliasBackward0",
        "CloneBackward0",
        "CopyBackwards",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "ToCopyBackward0",
    }
    | {"UnsqueezeBackward0", "ViewBackward0"}
)


@dataclass(frozen=True, slots=True)
class Root:
    """One number that a backward pass started from. Its tensors are our copies."""

    value: Tensor
    factors: tuple[float | Tensor, ...]
    """The factors that turned the loss into this number, the last multiplication first; NaN if one is unknown."""
    origin: Any
    """The call that returned the loss, as passed to `mark`; None if there was no such call, or more was added."""


def mark(result: Tensor, origin: Any) -> None:
    """Remember in the graph which call returned this tensor; of several, the innermost."""
    metadata = getattr(result.grad_fn, "metadata", None)
    if metadata is not None:
        metadata.setdefault(ORIGIN, origin)


class BackwardTap(FunctionTap):
    """Calls `on_begin` at each outermost backward pass; if that is true, `on_backward` with its roots and whether its
    graph is kept."""

    def __init__(
        self,
        on_begin: Callable[[], bool],
        on_backward: Callable[[list[Root], bool], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.on_begin, self.on_backward = on_begin, on_backward
        begins = protected(self._begins, on_error, "backward")
        super().__init__(torch.autograd, ["backward"], begins=begins, is_traced=False)

    def _begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_observable() or not self.on_begin():
            return
        given = dict(zip(("tensors", "grad_tensors", "retain_graph", "create_graph"), args, strict=False)) | kwargs
        if given.get("grad_tensors") is not None:
            return
        with quiet():
            tensors: Any = given.get("tensors")
            listed = tensors if isinstance(tensors, list | tuple) else [tensors]
            roots = [_root(tensor) for tensor in listed if _is_number(tensor)]
        if roots:
            self.on_backward(roots, bool(given.get("retain_graph") or given.get("create_graph")))


def _is_number(tensor: Any) -> bool:
    return is_plain_tensor(tensor) and tensor.numel() == 1 and tensor.is_floating_point() and tensor.grad_fn is not None


def _root(tensor: Tensor) -> Root:
    factors, origin = _climb(tensor.grad_fn)
    # A copy: the user may divide the original in place afterwards.
    return Root(tensor.detach().reshape(()).clone(), factors, origin)


def _climb(node: Any) -> tuple[tuple[float | Tensor, ...], Any]:
    """Walk from the root to the call that returned the loss, through multiplications by constants."""
    factors: list[float | Tensor] = []
    for _ in range(_MAX_NODES):
        origin = getattr(node, "metadata", {}).get(ORIGIN)
        if origin is not None:
            return tuple(factors), origin
        name = type(node).__name__
        above = [(place, other) for place, (other, _) in enumerate(node.next_functions) if other is not None]
        if len(above) != 1 or not (name in _SCALING or name in _PASSING):
            break
        if name in _SCALING:
            if len(factors) == _MAX_FACTORS:
                break
            factors.append(_factor(node, above[0][0], is_divided=_SCALING[name]))
        node = above[0][1]
    return tuple(factors), None


def _factor(node: Any, place: int, *, is_divided: bool) -> float | Tensor:
    saved = getattr(node, "_raw_saved_self" if place else "_raw_saved_other", None)
    is_packed = getattr(saved, "unpack_hook", saved) is not None  # or by a torch version that does not say
    number = None if saved is None or is_packed else saved.data
    if (is_divided and place) or not isinstance(number, Tensor) or number.numel() != 1:
        return math.nan
    if number.is_cuda:
        own = number.detach().reshape(()).to(torch.float64, copy=True)  # a scaler changes its own tensor in place
        return 1 / own if is_divided else own
    value = float(number) if number.device.type == "cpu" else math.nan
    return (1 / value if value else math.nan) if is_divided else value
