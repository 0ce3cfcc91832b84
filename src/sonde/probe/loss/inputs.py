"""Finds a model's input and prediction among the tensors of a call, by position and name. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from sonde.probe.outputs import is_plain_tensor, items_of

_MAX_DEPTH: Final = 3
_MAX_TENSORS: Final = 8

# Names of the input keyword, in order, in libraries whose models are called with keywords.
INPUT_NAMES: Final = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features", "x", "inputs")
OUTPUT_NAMES: Final = ("logits", "prediction", "output", "out")
_NO_INPUT: Final = ("label", "target", "mask", "position", "past", "cache")


def all_tensors(*values: Any) -> list[Tensor]:
    """The plain tensors inside, in order; at most a few."""
    found: list[Tensor] = []
    for value in values:
        _collect(value, found, 0)
    return found


def main_input(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor among the arguments; among keywords, or in a dictionary, the one named like an input."""
    for value in args:
        found = main_of(value, INPUT_NAMES)
        if found is not None:
            return found
    return main_of(kwargs, INPUT_NAMES)


def main_output(output: Any) -> Tensor | None:
    """The model's prediction: the tensor named like one, else the first that is not a single number."""
    named = main_of(output, OUTPUT_NAMES)
    if named is not None and named.ndim:
        return named
    tensors = all_tensors(output)
    return next((tensor for tensor in tensors if tensor.ndim), tensors[0] if tensors else None)


def main_of(value: Any, names: tuple[str, ...]) -> Tensor | None:
    """A tensor itself, or the most likely one of a structure."""
    if isinstance(value, Tensor):
        return value if _has_shape(value) else None
    pairs = [(str(key), item) for key, item in items_of(value)]
    known = {key: item for key, item in pairs if key in names}
    likely = [known[name] for name in names if name in known]
    likely += [item for key, item in pairs if key not in known and not any(word in key for word in _NO_INPUT)]
    for item in likely:
        tensors = all_tensors(item)
        if tensors:
            return tensors[0]
    return None


def _collect(value: Any, found: list[Tensor], depth: int) -> None:
    if len(found) >= _MAX_TENSORS or depth > _MAX_DEPTH:
        return
    if isinstance(value, Tensor):
        if _has_shape(value):
            found.append(value)
        return
    for _, item in items_of(value):
        _collect(item, found, depth + 1)


def _has_shape(tensor: Tensor) -> bool:
    """The shape; a nested tensor has none, and raises when asked."""
    return is_plain_tensor(tensor) and not tensor.is_nested
