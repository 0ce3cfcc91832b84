"""What `watch` was given: a model and its optimizers, or an error that says what was given instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

from sonde.errors import NotAModelError, UsageError
from sonde.probe.model import ModelNames

if TYPE_CHECKING:
    from sonde.session.model.watched import WatchedModel


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


def watched_before(model: nn.Module, prefix: str, watched_models: Sequence[WatchedModel]) -> list[WatchedModel]:
    """Those that a new watching of this model replaces: of the model itself, of the same in another wrapper, and of one
    with the same names that was trained before. One that is to be trained beside it must be told apart."""
    found = [watching for watching in watched_models if watching.names.model() is model]
    others = [watching for watching in watched_models if watching not in found and watching.names.model() is not None]
    own = _parameters(ModelNames(model, prefix=prefix)) if others else {}
    for watching in others:
        theirs = _parameters(watching.names)
        shared = own.keys() & theirs.keys()
        if shared and not watching.has_seen_gradients and any(own[name] is not theirs[name] for name in shared):
            raise UsageError(
                f'another watched model has "{min(shared)}" as well. Tell them apart by a name: '
                'watch(model, optimizer, prefix="generator.").'
            )
        found += [watching] if shared else []
    return found


def _parameters(names: ModelNames) -> dict[str, nn.Parameter | None]:
    return {named.name: named.ref() for named in names.parameters.values()}


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
