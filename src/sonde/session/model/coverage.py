"""Values that were requested but never seen, for one watched model or for several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.session.model.watched import WatchedModel


def coverage_of(watched_models: list[WatchedModel]) -> dict[str, Any]:
    """The combined coverage of several watched models: counts, lists and mappings alike."""
    total: dict[str, Any]
    total, *others = map(_of_one, watched_models)
    for coverage in others:
        for key, value in coverage.items():
            total[key] = {**total[key], **value} if isinstance(value, dict) else total[key] + value
    return total


def _of_one(watching: WatchedModel) -> dict[str, Any]:
    names = watching.names
    is_acting = repr(watching.plan.activations) != "never"
    silent = [p.name for p in names.places.values() if p.is_selected and not p.has_fired] if is_acting else []
    selected = {named.name for named in names.parameters.values() if named.is_selected}
    return {
        "modules": len(names.places),
        "parameters": len(names.parameters),
        "modules_never_seen": sorted(silent),
        "outputs_unread": sorted(place.name for place in names.places.values() if place.is_unread),
        "parameters_without_gradient": sorted(watching.without_grad - watching.with_grad),
        "parameters_not_in_optimizer": sorted(selected - watching.in_optimizer) if watching.in_optimizer else [],
        "unreadable": watching.unreadable,
        "captured_steps": watching.optimizers.num_captured,
    }
