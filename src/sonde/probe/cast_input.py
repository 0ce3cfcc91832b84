"""The input of a layer after autocast has cast it: the copy that the graph keeps, while the original is soon freed.

Only the node that made the layer's output is read, or the one before it. Saved tensors that a user's hook has packed
are left alone: unpacking would run the user's code.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

_SAVED: Final = {
    "AddmmBackward0": "_raw_saved_mat1",
    "MmBackward0": "_raw_saved_self",
    "LinearBackward0": "_raw_saved_input",
    "MkldnnLinearBackward0": "_raw_saved_self",
    "ConvolutionBackward0": "_raw_saved_input",
}
_PASSING: Final = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TBackward0"})


def cast_input(value: Tensor, output: Tensor) -> Tensor | None:
    """The copy of `value` that the computation of `output` used, if it was cast and the graph keeps it."""
    if value.dtype == output.dtype or value.dtype.itemsize < output.dtype.itemsize:
        return None
    node: Any = output.grad_fn
    if type(node).__name__ in _PASSING:
        node = node.next_functions[0][0]
    saved = getattr(node, _SAVED.get(type(node).__name__, ""), None)
    if saved is None or getattr(saved, "unpack_hook", saved) is not None:
        return None
    copy = saved.data
    return copy if type(copy) is Tensor and copy.numel() == value.numel() and copy.dtype == output.dtype else None
