"""A call of `watch`, checked as a whole before a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from sonde.config import Settings
from sonde.session.keywords import WatchKeywords, check_names
from sonde.session.observers.mirror import Mirror, as_mirrors
from sonde.session.plan import Plan, check_model, check_optimizers
from sonde.session.snapshot_plan import ON_DEMAND, Snapshots, as_plan
from sonde.write.tensors.store import check_store


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRequest:
    """The checked arguments of `watch`. Invalid ones raise here, before a run starts."""

    model: nn.Module
    optimizers: list[Optimizer] | None
    plan: Plan
    snapshots: Snapshots
    mirrors: list[Mirror]
    budget: dict[str, float | None]
    """The setting `budget`, if it was given."""

    @classmethod
    def of(cls, model: object, optimizer: object, given: WatchKeywords) -> WatchRequest:
        check_names(given, WatchKeywords, "watch()")
        budget = {"budget": given["budget"]} if "budget" in given else {}
        Settings.load(**cast(Any, budget))
        return cls(
            model=check_model(model),
            optimizers=check_optimizers(optimizer),
            plan=Plan.of(given),
            snapshots=as_plan(given.get("snapshots")),
            mirrors=as_mirrors(given.get("mirror")),
            budget=budget,
        )

    def check_store(self) -> None:
        """Refuse a store that cannot be opened, such as one whose package is missing."""
        if self.snapshots is not ON_DEMAND:
            check_store(self.snapshots.store, self.snapshots.options)
