"""The parameters of an optimizer step, parted by whether they have a gradient, and Adam's state of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

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
    keys: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """The sites of these names by kind and suffix, as far as they were asked for."""
    is_foreseen: bool = False
    """All of it was read before the step."""

    def __iter__(self) -> Iterator[tuple[NamedParameter, Tensor]]:
        return zip(self.names, self.params, strict=True)

    @property
    def has_grads(self) -> bool:
        return self.name == _WITH

    @property
    def grads(self) -> list[Tensor] | None:
        """None where one is missing."""
        found = [grad for p in self.params if (grad := p.grad) is not None]
        return found if len(found) == len(self.params) else None

    def with_plain_grads(self) -> tuple[ByGrad, list[Tensor]]:
        """Those whose gradient can be read, and the gradients: this itself where all can, as nearly always."""
        grads = [p.grad for p in self.params]
        is_plain = [is_plain_tensor(grad) for grad in grads]
        plain: list[Any] = list(compress(grads, is_plain))
        if len(plain) == len(grads):
            return self, plain
        return ByGrad(self.name, list(compress(self.names, is_plain)), list(compress(self.params, is_plain))), plain


_WITH: Final = "with"
_WITHOUT: Final = "without"


def by_grad(step: OptimizerStep, *, is_made: bool) -> list[ByGrad]:
    """The list of parameters with a gradient is nearly always the same; those without are kept apart from it. Where the
    step itself is still to make the gradients, all may have one."""
    if not step.params:
        return []
    has_grad = [not is_made or p.grad is not None for p in step.params]
    if all(has_grad):
        return [ByGrad(_WITH, step.names, step.params, step.keys)]
    has_none = [not has for has in has_grad]
    parts = [
        ByGrad(name, list(compress(step.names, which)), list(compress(step.params, which)))
        for name, which in ((_WITH, has_grad), (_WITHOUT, has_none))
    ]
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
