"""What `watch` was given: a model and its optimizers, or an error that says what was given instead."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

from sonde.errors import NotAModelError


def check_model(model: object) -> nn.Module:
    """The model, or an error that says what was given instead."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise NotAModelError(
            f"watch() was given the class {model.__name__}; give it an instance: watch({model.__name__}(...))."
        )
    if isinstance(model, Optimizer):
        raise NotAModelError("watch() was given an optimizer first; the order is watch(model, optimizer).")
    if isinstance(model, list | tuple):
        raise NotAModelError(
            f"watch() takes one model; got a {type(model).__name__} of {len(model)}. Call it for each, with a name: "
            'watch(model, optimizer, prefix="generator.").'
        )
    raise NotAModelError(f"watch() takes a torch.nn.Module; got {type(model).__name__}.")


def check_optimizers(optimizer: object) -> list[Optimizer] | None:
    """The optimizers as a list; None means: whichever steps this model."""
    if optimizer is None:
        return None
    if isinstance(optimizer, dict):
        optimizer = list(optimizer.values())
    items = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    found = []
    for item in items:
        if isinstance(item, _Loss):
            continue  # the criterion, in the second place as in wandb.watch
        inner = getattr(item, "optimizer", item)  # accelerate and others wrap the one that steps
        if not isinstance(inner, Optimizer):
            raise NotAModelError(
                f"watch(model, optimizer) takes a torch optimizer, or several; got {type(item).__name__}."
            )
        found.append(inner)
    return found or (None if items else [])
