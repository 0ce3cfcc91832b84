"""The order in which the numbers of a step are computed: batch, weights, activations, loss, gradients backwards,
updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.schema.records import Site

# Stages of a step. Gradients are computed from the output back to the input, so there the last layer comes first.
BATCH, WEIGHTS, FORWARD, LOSS, BACKWARD, GRADIENTS, SETTINGS, UPDATES, STATE, OTHER = range(10)
WORDS: Final = (
    *("batches", "weights", "activations", "losses", "gradients of activations", "gradients", "settings"),
    *("updates", "optimizer states", "other numbers"),
)
_KINDS: Final = {
    "param": WEIGHTS, "act": FORWARD, "actgrad": BACKWARD, "grad": GRADIENTS, "update": UPDATES, "optim": STATE,
}  # fmt: skip
_FROM_BEHIND: Final = (BACKWARD, GRADIENTS)
_UNKNOWN: Final = 1 << 30


class ForwardOrder:
    """The position of every series in a step: by the structure document, else in the order of first measurement."""

    def __init__(self, sites: Mapping[int, Site], structure: Mapping[str, Any]) -> None:
        self._sites = {(site.kind, site.name): (number, site) for number, site in sites.items()}
        self._orders = {
            str(module.get("name")): int(module["order"])
            for module in structure.get("modules", ())
            if isinstance(module.get("order"), int) and module["order"] >= 0
        }
        if not self._orders:  # activations are measured in the order of computation
            owners = [site.owner or site.name for _, site in sorted(sites.items()) if site.kind == "act"]
            self._orders = {owner: place for place, owner in enumerate(dict.fromkeys(owners))}

    def stage(self, kind: str, site: str) -> int:
        """The part of the step that a series belongs to; scalars have the kind ""."""
        if kind == "":
            return SETTINGS if site.startswith("optim/") else LOSS
        if kind == "data":
            return BATCH if site in ("batch", "input", "target") else LOSS
        if kind == "custom":
            return BATCH if site.startswith("batch.") else OTHER
        return _KINDS.get(kind, OTHER)

    def key(self, kind: str, site: str) -> tuple[int, int, int]:
        """Sorts series in the order of computation within a step."""
        stage = self.stage(kind, site)
        number, _ = self._sites.get((kind, site), (_UNKNOWN, None))
        order = self._orders.get(self.owner(kind, site), _UNKNOWN)
        if stage in _FROM_BEHIND:
            return stage, -order if order != _UNKNOWN else _UNKNOWN, -number
        return stage, order, number

    def depth(self, module: str) -> int:
        """Position of a module in the forward pass, from the input on; a very large number if it was not seen."""
        return self._orders.get(module, _UNKNOWN)

    def owner(self, kind: str, site: str) -> str:
        _, known = self._sites.get((kind, site), (0, None))
        return site if known is None else known.owner or site

    def module_type(self, kind: str, site: str) -> str:
        _, known = self._sites.get((kind, site), (0, None))
        return "" if known is None else known.module_type
