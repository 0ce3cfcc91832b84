"""What `watch` was given: a model, its optimizers, and what to record of it and when. Anything else is an error that
says what was given instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer

from sonde.errors import NotAModelError
from sonde.probe.schedule import ALWAYS, DEFAULT_ACTIVATIONS, DEFAULT_INSPECT, Schedule, as_schedule

IN_GRAPH: Final = "in-graph"
"""`activations="in-graph"`: those inside compiled regions as well, by an operation in the compiled program."""
SCHEDULED: Final = ("params", "grads", "updates", "optim", "activations", "activation_grads", "inspect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One schedule for each kind, and the sites they hold for."""

    params: Schedule
    grads: Schedule
    updates: Schedule
    optim: Schedule
    activations: Schedule
    activation_grads: Schedule
    inspect: Schedule
    """When the numbers that rules look at are taken: kinds unit, attn, rnn, data and model."""
    sites: object
    prefix: str = ""
    in_graph: bool = False
    """Activations inside compiled regions too, which changes what is compiled."""

    @classmethod
    def of(
        cls,
        *,
        params: Any,
        grads: Any,
        updates: Any,
        optim: Any,
        activations: Any,
        activation_grads: Any,
        inspect: Any,
        sites: Any,
        when: Any,
        prefix: str,
        **others: Any,
    ) -> Plan:
        """By the keywords of `watch`. `others` are those of `wandb.watch`."""
        if others:
            from sonde.session.wandb_keywords import translate

            asked = {"params": params, "grads": grads, "updates": updates, "optim": optim, "when": when}
            params, grads, updates, optim, when = (asked | translate(others)).values()
        default = as_schedule(when, default=ALWAYS, argument="when")

        def schedule(value: Any, argument: str, default: Schedule = default) -> Schedule:
            return as_schedule(value, default=default, argument=argument)

        return cls(
            params=schedule(params, "params"),
            grads=schedule(grads, "grads"),
            updates=schedule(updates, "updates"),
            optim=schedule(optim, "optim"),
            activations=schedule(True if activations == IN_GRAPH else activations, "activations", DEFAULT_ACTIVATIONS),
            activation_grads=schedule(activation_grads, "activation_grads", DEFAULT_ACTIVATIONS),
            inspect=schedule(inspect, "inspect", DEFAULT_INSPECT),
            sites=sites,
            prefix=prefix,
            in_graph=activations == IN_GRAPH,
        )

    def described(self) -> dict[str, str]:
        """Each schedule in words."""
        return {name: repr(getattr(self, name)) for name in SCHEDULED}


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
