"""Which models a new watching replaces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sonde.errors import UsageError
from sonde.probe.model import ModelNames
from sonde.session.model.watched import WatchedModel


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
