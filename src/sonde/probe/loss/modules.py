"""Calls of torch's loss functions, in training and evaluation, including those by `nn.CrossEntropyLoss` and the
like."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from sonde.probe.guards import is_observable, protected
from sonde.probe.loss.functions import FunctionTap
from sonde.probe.outputs import is_plain_tensor

LOSSES: Final = (
    "cross_entropy",
    "nll_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
)


@dataclass(frozen=True, slots=True)
class LossCall:
    """One call of a loss, while it runs. Holds the user's tensors, so it must not be kept."""

    name: str
    input: Tensor
    target: Tensor
    result: Tensor
    reduction: str
    """"mean", "sum", "none", "batchmean", or "" if only deprecated arguments say."""
    ignore_index: int
    weight: Tensor | None = None
    """Weights of the classes, or of the elements."""
    pos_weight: Tensor | None = None
    label_smoothing: float = 0.0


class LossSink(Protocol):
    """Receives loss calls."""

    @property
    def wants_loss(self) -> bool:
        """Checked at every call of a loss in the process: must be cheap."""

    def loss_called(self, call: LossCall) -> None:
        """Also called for losses that nothing is trained with, as in an evaluation: then gradients are off."""


class LossTap(FunctionTap):
    """Reports each eagerly computed loss to the sink, while the sink wants it."""

    def __init__(self, sink: LossSink, on_error: Callable[[str, Exception], None]) -> None:
        self.sink = sink
        super().__init__(torch.nn.functional, LOSSES, protected(self._seen, on_error, "loss"))

    def _seen(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self.sink.wants_loss or not is_observable(in_inference=True):
            return
        call = _bound(name, args, kwargs, result)
        if call is not None:
            self.sink.loss_called(call)


def _bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> LossCall | None:
    bound = _signature(name).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if not all(is_plain_tensor(value) for value in (given["input"], given["target"], result)):
        return None
    is_deprecated = given.get("size_average") is not None or given.get("reduce") is not None
    reduction = "" if is_deprecated else str(given["reduction"])
    return LossCall(
        name,
        given["input"],
        given["target"],
        result,
        reduction,
        given.get("ignore_index", -100),
        given.get("weight"),
        given.get("pos_weight"),
        given.get("label_smoothing", 0.0),
    )


@lru_cache(maxsize=len(LOSSES))
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(torch.nn.functional, name))
