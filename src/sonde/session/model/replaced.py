"""Finds the models that a new call of `watch` replaces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sonde.errors import UsageError
from sonde.probe.model import ModelNames
from sonde.session.model.watched import WatchedModel


def watched_before(model: nn.Module, prefix: str, watched_models: Sequence[WatchedModel]) -> list[WatchedModel]:
    """The same model, the same in another wrapper, and models with the same parameter names that were trained before.
    A model with the same names that was not trained yet is an error: it needs a prefix."""
    found = [watching for watching in watched_models if watching.names.model() is model]
    others = [watching for watching in watched_models if watching not in found and watching.names.model() is not None]
    own = _parameters(ModelNames(model, prefix=prefix)) if others else {}
    for watching in others:
        theirs = _parameters(watching.names)
        shared = own.keys() & theirs.keys()
        if shared and not watching.has_seen_gradients and any(own[name] is not theirs[name] for name in shared):
            raise UsageError(
                f'another watched model also has "{min(shared)}". Tell them apart with a prefix: '
                'watch(model, optimizer, prefix="generator.").'
            )
        found += [watching] if shared else []
    return found


def _parameters(names: ModelNames) -> dict[str, nn.Parameter | None]:
    return {named.name: named.ref() for named in names.parameters.values()}
