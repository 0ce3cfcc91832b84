"""Outputs and targets that the loss was not made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from programs.fault import (
    SLOW,
    fault,
    of_task,
)
from programs.setup import Setup
from programs.tasks import Data


@fault(
    "double_softmax",
    "wrong_loss_activation_pair",
    also=(*SLOW, "lr_too_low"),
    num=5,
    where=lambda _a, t: t.is_class and t.name in ("multiclass", "images", "recall"),
)
def _double(s: Setup, level: int) -> None:
    _wrap(s, lambda output: output.softmax(-1))


@fault(
    "sigmoid_and_logits",
    "wrong_loss_activation_pair",
    also=(*SLOW, "class_imbalance"),
    num=4,
    where=of_task("binary", "clicks", "segmentation", "imbalanced"),
)
def _double_sigmoid(s: Setup, level: int) -> None:
    _wrap(s, torch.sigmoid)


@fault(
    "relu_output",
    "wrong_loss_activation_pair",
    also=(*SLOW, "dead_relu"),
    num=4,
    where=of_task("regression", "localisation", "forecast", "ratings"),
)
def _relu_output(s: Setup, level: int) -> None:
    _wrap(s, (torch.relu, torch.sigmoid, torch.relu)[level])


@fault(
    "softmax_over_batch",
    "wrong_loss_activation_pair",
    also=(*SLOW, "label_shuffling"),
    num=3,
    where=of_task("multiclass", "images"),
)
def _wrong_dim(s: Setup, level: int) -> None:
    s.loss = lambda output, y: functional.nll_loss(output.log_softmax(0), y)


class _Then(nn.Module):
    """A model with one more layer at its end."""

    def __init__(self, body: nn.Module, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.last = body, last

    def forward(self, x: Any) -> Any:
        return self.last(self.body(x))


def _wrap(s: Setup, last: Callable[[Tensor], Tensor]) -> None:
    s.wrap = lambda model: _Then(model, last)


@fault(
    "loss_shape_broadcast",
    also=(*SLOW, "label_shuffling", "rank_collapse"),
    num=5,
    where=of_task("regression", "forecast", "ratings"),
)
def _broadcast(s: Setup, level: int) -> None:
    d = s.data
    s.data = Data(d.x, d.y[:, 0], d.x_val, d.y_val[:, 0])
