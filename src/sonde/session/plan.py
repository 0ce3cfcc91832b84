"""A call of `watch`, checked as a whole before a run starts: a model, its optimizers, and what to record when. Anything
else is an error that names the wrong argument."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

from sonde.config import Settings
from sonde.errors import NotAModelError, UsageError
from sonde.probe.schedule import ALWAYS, DEFAULT_ACTIVATIONS, DEFAULT_INSPECT, Schedule, as_schedule, every
from sonde.probe.select import chooser
from sonde.session.keywords import DEFAULTS, WatchKeywords, check_names
from sonde.session.observers.mirror import Mirror, as_mirrors
from sonde.session.snapshot_plan import ON_DEMAND, Snapshots, as_plan
from sonde.write.tensors.store import check_store

IN_GRAPH: Final = "in-graph"
"""`activations="in-graph"`: also those inside compiled regions, by an operation in the compiled program."""
_WANDB_LOGS: Final[dict[str | None, dict[str, bool]]] = {
    "all": {},
    "gradients": {"params": False, "updates": False, "optim": False},
    "parameters": {"grads": False, "updates": False, "optim": False},
    None: {"params": False, "grads": False, "updates": False, "optim": False},
}
_NOT_GIVEN: Final = "not given"

SCHEDULED: Final = ("params", "grads", "updates", "optim", "activations", "activation_grads", "inspect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One schedule for each kind, and the sites they apply to."""

    params: Schedule
    grads: Schedule
    updates: Schedule
    optim: Schedule
    activations: Schedule
    activation_grads: Schedule
    inspect: Schedule
    """When the numbers for the rules are measured: kinds unit, attn, rnn, data and model."""
    sites: object
    prefix: str = ""
    in_graph: bool = False
    """Also record activations inside compiled regions, which changes the compiled program."""

    @classmethod
    def of(cls, given: WatchKeywords) -> Plan:
        """Build a plan from the keywords of `watch`."""
        asked: dict[str, Any] = {
            **DEFAULTS,
            **given,
            **_from_wandb(given.get("log", _NOT_GIVEN), given.get("log_freq")),
        }
        default = as_schedule(asked["when"], default=ALWAYS, argument="when")

        def schedule(argument: str, default: Schedule = default) -> Schedule:
            is_in_graph = argument == "activations" and asked[argument] == IN_GRAPH
            return as_schedule(True if is_in_graph else asked[argument], default=default, argument=argument)

        sites = asked["sites"]
        if isinstance(sites, Iterator):
            sites = list(sites)
        chooser(sites)  # refuses what does not select sites
        return cls(
            params=schedule("params"),
            grads=schedule("grads"),
            updates=schedule("updates"),
            optim=schedule("optim"),
            activations=schedule("activations", DEFAULT_ACTIVATIONS),
            activation_grads=schedule("activation_grads", DEFAULT_ACTIVATIONS),
            inspect=schedule("inspect", DEFAULT_INSPECT),
            sites=sites,
            prefix=asked["prefix"],
            in_graph=asked["activations"] == IN_GRAPH,
        )

    def described(self) -> dict[str, str]:
        """A description of each schedule."""
        return {name: repr(getattr(self, name)) for name in SCHEDULED}


def _from_wandb(log: Any, log_freq: Any) -> dict[str, Any]:
    """The keywords of `watch` for those of `wandb.watch`. Its `criterion`, `idx` and `log_graph` have no effect."""
    if log != _NOT_GIVEN and log not in _WANDB_LOGS:
        raise UsageError(f'log= must be "gradients", "parameters", "all" or None, as in wandb.watch; got {log!r}.')
    if log_freq is not None and (not isinstance(log_freq, int) or log_freq < 1):
        raise UsageError(f"log_freq= must be a number of steps, at least 1; got {log_freq!r}.")
    found: dict[str, Any] = {} if log == _NOT_GIVEN else dict(_WANDB_LOGS[log])
    return found if log_freq is None else {**found, "when": every(log_freq)}


def check_model(model: object) -> nn.Module:
    """The model, or an error that says what was passed instead."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise NotAModelError(f"watch() got the class {model.__name__}; pass an instance: watch({model.__name__}(...)).")
    if isinstance(model, Optimizer):
        raise NotAModelError("watch() got an optimizer as its first argument; the order is watch(model, optimizer).")
    if isinstance(model, list | tuple):
        raise NotAModelError(
            f"watch() takes one model; got a {type(model).__name__} of {len(model)}. Call it once for each, with a "
            'prefix: watch(model, optimizer, prefix="generator.").'
        )
    raise NotAModelError(f"watch() takes a torch.nn.Module; got {type(model).__name__}.")


def check_optimizers(optimizer: object) -> list[Optimizer] | None:
    """The optimizers as a list; None means every optimizer that updates this model."""
    if optimizer is None:
        return None
    if isinstance(optimizer, dict):
        optimizer = list(optimizer.values())
    items = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    found = []
    for item in items:
        if isinstance(item, _Loss):
            continue  # the criterion, as second argument like in wandb.watch
        inner = getattr(item, "optimizer", item)  # accelerate and others wrap the optimizer that steps
        if callable(getattr(inner, "step", None)) and not isinstance(inner, Optimizer | type):
            raise NotAModelError(
                f"watch(model, optimizer) takes a torch optimizer, or several; {type(item).__name__} is not one. Leave "
                "it out, watch(model), and call sonde.step() after each of its steps."
            )
        if not isinstance(inner, Optimizer):
            raise NotAModelError(
                f"watch(model, optimizer) takes a torch optimizer, or several; got {type(item).__name__}."
            )
        found.append(inner)
    return found or (None if items else [])


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
