"""What to record of a watched model, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sonde.probe.schedule import Schedule


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


SCHEDULED: Final = ("params", "grads", "updates", "optim", "activations", "activation_grads", "inspect")
