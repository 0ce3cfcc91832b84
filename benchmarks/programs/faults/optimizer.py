"""The optimizer: its settings, its gradients, and the parameters it was given."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from programs.fault import (
    BROKEN,
    SLOW,
    fault,
    is_labelled,
    is_not_lora,
)
from programs.setup import PLAIN, Setup


@fault("adam_epsilon_dominates", "adam_epsilon_dominates lr_too_low", num=6, optimizers=("adam", "adamw"))
def _epsilon(s: Setup, level: int) -> None:
    s.optim["eps"] = (1.0, 10.0, 100.0)[level]


@fault(
    "adam_second_moment_underestimate",
    also=(*BROKEN, "bad_batches", "lr_too_high"),
    num=5,
    optimizers=("adam", "adamw"),
)
def _second_moment(s: Setup, level: int) -> None:
    """A term of the loss is switched on halfway, and the second moment remembers a thousand steps."""
    s.optim["betas"] = (0.9, 0.9999)
    s.rate *= 4
    inner, calls, factor = s.loss, [0], (30, 100, 300)[level]

    def loss(output: Any, y: Any) -> Tensor:
        calls[0] += output[0].requires_grad if isinstance(output, tuple) else output.requires_grad
        return inner(output, y) * (factor if calls[0] > s.steps // 2 else 1.0)

    s.loss = loss


@fault("missing_zero_grad", also=(*BROKEN, "lr_too_high"), num=7)
def _no_zero_grad(s: Setup, level: int) -> None:
    s.zero_grad = False


@fault("flipped_gradient", also=(*BROKEN, "lr_too_high"), num=6)
def _flipped(s: Setup, level: int) -> None:
    if level == 0:
        inner = s.loss
        s.loss = lambda output, y: -inner(output, y)
    elif level == 1:
        s.optim["maximize"] = True
    else:
        s.after_backward = lambda model: [p.grad.neg_() for p in model.parameters() if p.grad is not None]


@fault("over_regularisation", also=(*SLOW, "rank_collapse", "dead_relu", "lr_too_low", "residual_decay"), num=6)
def _decayed(s: Setup, level: int) -> None:
    s.optim["weight_decay"] = (0.3, 1.0, 3.0)[level] if s.optimizer != "adamw" else 0.1 * (1, 3, 8)[level] / s.rate


@fault("clip_too_tight", "clip_too_tight lr_too_low", num=6, optimizers=PLAIN, where=is_not_lora)
def _clipped(s: Setup, level: int) -> None:
    s.clip = (1e-2, 1e-3, 1e-4)[level]


@fault(
    "optimizer_missing_params",
    also=(*SLOW, "frozen_layers", "missing_zero_grad", "detached_graph"),
    num=8,
    where=is_not_lora,
)
def _missing(s: Setup, level: int) -> None:
    def groups(model: nn.Module, rate: float) -> list[Any]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return (parameters[-2:], parameters[: len(parameters) // 2], parameters[:2])[level]

    s.groups = groups


@fault(
    "optimizer_of_old_model",
    "optimizer_missing_params",
    also=(*SLOW, "frozen_layers", "detached_graph", "lr_not_applied"),
    num=3,
    where=is_not_lora,
)
def _old_model(s: Setup, level: int) -> None:
    """The model was built again after the optimizer."""
    s.groups = lambda model, _rate: [nn.Parameter(p.detach().clone()) for p in model.parameters()]


@fault(
    "loss_reduction_sum",
    also=(*BROKEN, "lr_too_high", "clip_too_tight"),
    num=6,
    optimizers=PLAIN,
    where=lambda a, t: is_labelled(a, t) and t.name != "imbalanced" and not a.adaptive,
)
def _summed(s: Setup, level: int) -> None:
    s.batch = (32, 64, 128)[level]
    s.loss.reduction = "sum"
