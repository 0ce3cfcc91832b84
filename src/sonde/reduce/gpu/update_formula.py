"""The update formula of an optimizer as numbers: enough to predict the update before the step, without a copy.

Adam, AdamW and SGD are one formula with different numbers. With g the gradient as the optimizer uses it,

    d = sign * g + l2 * p
    m' = keep1 * m + add1 * d          v' = keep2 * v + add2 * d * d
    adam:  p' = p - decay * p - lr / (1 - beta1**t) * m' / (sqrt(v' / (1 - beta2**t)) + eps)
    sgd:   p' = p - lr * (with_grad * d + with_buffer * m')

and the update is p' - p, rounded as p is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch import Tensor

# Columns of the table that a kernel reads.
SIGN, L2, DECAY, KEEP1, ADD1, KEEP2, ADD2, LR, EPS, WITH_GRAD, WITH_BUFFER, TAKEN = range(12)
NUM_NUMBERS: Final = 12

Family = Literal["adam", "sgd"]


@dataclass(slots=True)
class UpdateFormula:
    """The formula of each parameter of a list, as the next step will apply it."""

    family: Family
    numbers: list[list[float]]
    """A row of NUM_NUMBERS for each parameter."""
    first: Sequence[Tensor | None]
    """exp_avg or momentum_buffer before the step; None if there is none yet, which counts as zeros."""
    second: Sequence[Tensor | None]
    """exp_avg_sq before the step."""
    taken: Sequence[Tensor] | None = None
    """Number of earlier steps, if they are counted on the device."""
    states: tuple[str, ...] = ()
    """The optimizer's names for its states."""
    grad_scale: Tensor | None = None
    """Gradients are still multiplied by this."""
    found_inf: Tensor | None = None
    """If it is not zero, the step will be skipped."""

    def of(self, places: Sequence[int]) -> UpdateFormula:
        """The same for some of the parameters."""
        taken = None if self.taken is None else [self.taken[i] for i in places]
        return replace(
            self,
            numbers=[self.numbers[i] for i in places],
            first=[self.first[i] for i in places],
            second=[self.second[i] for i in places],
            taken=taken,
        )


def adam_numbers(group: dict[str, Any], taken: float, *, decoupled: bool) -> list[float]:
    """The row of a parameter after `taken` steps of Adam or AdamW."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    row = [0.0] * NUM_NUMBERS
    row[SIGN] = -1.0 if group.get("maximize") else 1.0
    row[L2], row[DECAY] = (0.0, lr * decay) if decoupled else (decay, 0.0)
    row[KEEP1], row[ADD1], row[KEEP2], row[ADD2] = beta1, 1 - beta1, beta2, 1 - beta2
    row[LR], row[EPS], row[TAKEN] = lr, float(group["eps"]), taken
    return row


def sgd_numbers(group: dict[str, Any], *, has_buffer: bool) -> list[float]:
    """The row of a parameter of SGD. The first step with momentum copies the gradient into the buffer."""
    momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
    row = [0.0] * NUM_NUMBERS
    row[SIGN] = -1.0 if group.get("maximize") else 1.0
    row[L2], row[LR] = float(group["weight_decay"]), float(group["lr"])
    if momentum:
        row[KEEP1] = momentum
        row[ADD1] = 1.0 - float(group["dampening"]) if has_buffer else 1.0
    row[WITH_GRAD] = 1.0 if nesterov or not momentum else 0.0
    row[WITH_BUFFER] = (momentum if nesterov else 1.0) if momentum else 0.0
    return row
