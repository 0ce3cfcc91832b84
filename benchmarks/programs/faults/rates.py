"""Learning rates that are too high, too low, die away or never arrive."""

from __future__ import annotations

from typing import Any

from torch import nn

from programs.fault import (
    BROKEN,
    SLOW,
    fault,
    is_in,
    is_not_lora,
)
from programs.setup import ADAMS, PLAIN, Setup


@fault("lr_too_high", also=BROKEN, num=14)
def _lr_high(s: Setup, level: int) -> None:
    s.rate *= (60, 200, 1000)[level]


@fault(
    "divergence", "lr_too_high", also=(*BROKEN, "nan_inf"), num=20, optimizers=PLAIN, where=lambda a, _t: not a.adaptive
)
def _divergence(s: Setup, level: int) -> None:
    s.rate = (2.0, 8.0, 40.0)[level] * (0.3 if s.optimizer != "sgd" else 1.0)


@fault("lr_too_low", also=(*SLOW, "lr_not_applied"), num=9)
def _lr_low(s: Setup, level: int) -> None:
    s.rate *= (3e-3, 3e-4, 1e-5)[level]


@fault("lr_decay_too_fast", "lr_decay_too_fast", also=(*SLOW, "lr_too_low"), num=6)
def _decay(s: Setup, level: int) -> None:
    per_step = (0.85, 0.7, 0.5)[level]
    s.lambda_lr = lambda i, _n: per_step**i


@fault("warmup_never_ends", "lr_too_low lr_not_applied", also=SLOW, num=5)
def _endless_warmup(s: Setup, level: int) -> None:
    length = (3e4, 3e5, 3e6)[level]
    s.lambda_lr = lambda i, _n: i / length


@fault(
    "loss_oscillation",
    "loss_oscillation lr_too_high",
    also=BROKEN,
    num=4,
    optimizers=("momentum", "nesterov"),
    where=is_not_lora,
)
def _oscillation(s: Setup, level: int) -> None:
    s.rate *= (8, 15, 30)[level]
    s.optim["momentum"] = 0.98


@fault("missing_warmup", "missing_warmup lr_too_high", also=BROKEN, num=4, where=is_in("post_norm"), optimizers=ADAMS)
def _no_warmup(s: Setup, level: int) -> None:
    s.rate *= (12, 20, 40)[level]
    s.lambda_lr = None


@fault("slow_group", "uneven_learning_rates lr_too_low qkv_imbalance lr_not_applied frozen_layers", num=4)
def _slow_group(s: Setup, level: int) -> None:
    """The body learns 1e5 times more slowly than the head: a wrong exponent in a parameter group."""

    def groups(model: nn.Module, rate: float) -> list[Any]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return [{"params": parameters[:-2], "lr": rate * (1e-4, 1e-5, 1e-6)[level]}, {"params": parameters[-2:]}]

    s.groups = groups
