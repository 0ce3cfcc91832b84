"""A micro-batch trained by a method's own `train_step`, under the trainer's accumulation, precision and scaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sonde.errors import UsageError


def own_step(trainer: Any, model: Any, inputs: Any) -> Tensor:
    """Run `train_step`; give its loss as the trainer counts it: divided by the number of micro-batches."""
    model.train()
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()
    backward = _ScaledBackward(trainer)
    with trainer.compute_loss_context_manager(), trainer.accelerator.autocast(), backward.in_place():
        given = trainer.method.train_step(trainer._prepare_inputs(inputs))
    loss = _checked(trainer, given, is_backward_done=backward.num_calls > 0)
    if not backward.num_calls:
        trainer.accelerator.backward(loss / backward.num_micro_batches)
    return loss.detach() / backward.num_micro_batches


class _ScaledBackward:
    """What `loss.backward()` does inside `train_step`: the gradients of a micro-batch count as one of N."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.num_calls = trainer, 0
        self.num_micro_batches: int = trainer.current_gradient_accumulation_steps

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """`Tensor.backward` calls `torch.autograd.backward`, looked up at each call: both are replaced."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            torch.autograd.backward = original
            try:
                with torch.autocast(self.trainer.args.device.type, enabled=False):
                    self._run(original, tensors, args, kwargs)
            finally:
                torch.autograd.backward = backward
            self.num_calls += 1

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def _run(self, original: Any, tensors: Any, args: Any, kwargs: Any) -> None:
        is_plain = isinstance(tensors, Tensor) and all(v is None or v is False for v in (*args, *kwargs.values()))
        if is_plain:
            self.trainer.accelerator.backward(tensors / self.num_micro_batches)
            return
        scaler = self.trainer.accelerator.scaler
        parts = [part / self.num_micro_batches for part in ([tensors] if isinstance(tensors, Tensor) else tensors)]
        original([part if scaler is None else scaler.scale(part) for part in parts], *args, **kwargs)


def _checked(trainer: Any, given: Any, *, is_backward_done: bool) -> Tensor:
    """The loss as a tensor, or an error that says what `train_step` has to return."""
    step = f"{type(trainer.method).__name__}.train_step"
    if isinstance(given, int | float) and is_backward_done:
        given = torch.tensor(float(given), device=trainer.args.device)
    if not isinstance(given, Tensor):
        raise UsageError(f"{step} returned {_described(given)}; return the loss of the batch:  return loss")
    if given.numel() != 1:
        raise UsageError(
            f"{step} returned a tensor of shape {tuple(given.shape)}; return one number:  return loss.mean()"
        )
    if not is_backward_done and not given.requires_grad:
        raise UsageError(
            f"{step} returned a loss without a graph and never called backward(), so nothing would be trained. Call "
            "loss.backward(), or return the loss without detach()."
        )
    return given.reshape(())


def _described(given: Any) -> str:
    return "None" if given is None else f"a {type(given).__name__}"
