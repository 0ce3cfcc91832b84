"""Runs a model on a batch of any form and returns a scalar loss: tensors, tuples, dicts, models with their own loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from sonde.errors import UsageError

LossFunction = Callable[..., Any]


def forward(model: nn.Module, x: Any, y: Any, loss_fn: LossFunction | None) -> tuple[Any, Tensor]:
    """The model's output and the loss. `loss_fn=None`: the model computes its own from `y`, passed as `labels`."""
    if loss_fn is None and y is not None and not _takes_labels(model):
        raise UsageError(
            f"no loss_fn was passed, and {type(model).__name__} does not compute its own loss from labels. "
            "Pass one:  analyze(x, y, nn.CrossEntropyLoss())"
        )
    output = call(model, x, labels=y if loss_fn is None else None)
    loss = own_loss(output) if loss_fn is None else _loss(loss_fn, output, y)
    if not isinstance(loss, Tensor):
        raise UsageError(f"the loss must be a tensor; loss_fn returned {type(loss).__name__}.")
    if loss.numel() != 1:
        raise UsageError(f"the loss must be a single number; it has shape {tuple(loss.shape)}. Take its mean().")
    if not loss.requires_grad and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient, and neither does the batch.")
    return output, loss


def _takes_labels(model: nn.Module) -> bool:
    """Whether the model accepts `labels=`. A wrapper passes its arguments on: there the model inside decides."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return True  # one without a signature, such as a scripted model
    return any(p.name == "labels" or p.kind is p.VAR_KEYWORD for p in parameters)


def call(model: nn.Module, x: Any, labels: Any = None) -> Any:
    """`model(**x)` for a dict, `model(*x)` for a tuple or list, else `model(x)`."""
    if isinstance(x, Mapping):
        extra = {"labels": labels} if labels is not None and "labels" not in x else {}
        return model(**x, **extra)
    extra = {"labels": labels} if labels is not None else {}
    return model(*x, **extra) if isinstance(x, tuple | list) else model(x, **extra)


def own_loss(output: Any) -> Any:
    """The loss inside a model's output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Tensor) and output.numel() == 1:
        return output
    if loss is None:
        raise UsageError(
            "no loss_fn was passed and the model returned no loss. Pass one:  analyze(x, y, nn.CrossEntropyLoss())"
        )
    return loss


def _loss(loss_fn: LossFunction, output: Any, y: Any) -> Any:
    prediction = getattr(output, "logits", output)
    return loss_fn(prediction) if y is None else loss_fn(prediction, y)


def part(value: Any, index: int, num_parts: int) -> Any:
    """Every `num_parts`-th sample from `index` on, of everything that has a batch dimension."""
    if num_parts == 1:
        return value
    if isinstance(value, Tensor):
        return value[index::num_parts].contiguous() if value.ndim and value.shape[0] >= num_parts else value
    if isinstance(value, Mapping):
        return {key: part(item, index, num_parts) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(part(item, index, num_parts) for item in value)
    return value


def copied(value: Any) -> Any:
    """The batch, safe from a first layer that works in place."""
    if isinstance(value, Tensor):
        # A leaf that requires a gradient cannot be changed in place; torch says so itself.
        return value if value.requires_grad or not value.is_floating_point() else value.clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(copied(item) for item in value)
    return value


def batch_size(value: Any) -> int:
    """Samples in a batch; 1 if unknown."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else 1
    items = (
        list(value.values()) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple | list) else []
    )
    return max((batch_size(item) for item in items), default=1)
