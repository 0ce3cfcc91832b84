"""The parameters of an optimizer step, parted by whether they have a gradient, and Adam's state of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sonde.probe.model import NamedParameter
from sonde.probe.optimizer import OptimizerStep
from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.optimizer_pass import Moments


@dataclass(slots=True)
class ByGrad:
    """Parameters of a step that have a gradient, or that have none."""

    name: str
    names: list[NamedParameter]
    params: list[Tensor]
    is_foreseen: bool = False
    """All of it was read before the step."""

    def __iter__(self) -> Iterator[tuple[NamedParameter, Tensor]]:
        return zip(self.names, self.params, strict=True)

    @property
    def grads(self) -> list[Tensor] | None:
        found = [p.grad for p in self.params if p.grad is not None]
        return found if len(found) == len(self.params) else None


def by_grad(step: OptimizerStep) -> list[ByGrad]:
    """The list of parameters with a gradient is nearly always the same; those without are kept apart from it."""
    parts = [ByGrad("with", [], []), ByGrad("without", [], [])]
    for named, parameter in zip(step.names, step.params, strict=True):
        part = parts[parameter.grad is None and not step.has_closure]
        part.names.append(named)
        part.params.append(parameter)
    return [part for part in parts if part.params]


def adam_moments(optimizer: Optimizer, params: list[Tensor]) -> Moments | None:
    """Adam's state, if this optimizer keeps any."""
    states = [optimizer.state.get(p, {}) for p in params]
    if not all(is_plain_tensor(s.get("exp_avg")) and is_plain_tensor(s.get("exp_avg_sq")) for s in states):
        return None
    if any(
        s["exp_avg"].shape != p.shape or s["exp_avg_sq"].shape != p.shape for s, p in zip(states, params, strict=True)
    ):
        return None  # factored states, as Adafactor's
    group = optimizer.param_groups[0]
    beta2, taken = group.get("betas", (0.9, 0.999))[1], states[0].get("step", 1)
    correction = _correction(beta2, taken)
    return Moments(
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        correction=correction,
        floor=float(group.get("eps", 1e-8)) ** 2 * correction,
    )


def _correction(beta2: Any, taken: Any) -> Any:
    """1 - beta2**t. A step count that lives on the device stays there."""
    if isinstance(taken, Tensor) and taken.device.type == "cpu":
        taken = taken.item()
    return 1.0 - beta2**taken
