"""How far back a recurrent layer's output can be traced: the gradient of the last output at the first input.

A shadow pass on a few rows, with the layer's current weights and without dropout. It draws no random numbers and
touches no parameter: only the copied input requires a gradient.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sonde.reduce.inspect.weights import start_vector

MAX_ROWS: Final = 4
MAX_LENGTH: Final = 256
NUM_STOPS: Final = 16


def reach(module: nn.RNNBase, inputs: Tensor) -> tuple[Tensor, int, list[Tensor]] | None:
    """(norm of d out_last / d x_first over norm of d out_last / d x_last, length, the same along the way), along fixed
    directions. "Along the way" is at up to NUM_STOPS evenly spaced time steps, from the first to the last.

    None if there is nothing to trace: a sequence of fewer than two steps, an input that is not a padded batch.
    """
    x = _few_rows(module, inputs)
    if x is None or x.shape[1] < 2:
        return None
    # The user's own hooks on saved tensors (a checkpoint's) must not see ours.
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        x.requires_grad_()
        last = _forward(module, x)[:, -1, : module.proj_size or module.hidden_size]
        rows, width = last.shape
        directions = start_vector(rows * width, last).view(rows, width).to(last.dtype)
        (grad,) = torch.autograd.grad((last * directions).sum(), x)
    by_step = torch.linalg.vector_norm(grad.float(), dim=(0, 2))
    first, final = by_step[0], by_step[-1]
    relative = torch.where(final > 0, by_step / final, torch.where(by_step > 0, torch.inf, torch.nan))
    length = x.shape[1]
    stops = range(length) if length <= NUM_STOPS else [i * (length - 1) // (NUM_STOPS - 1) for i in range(NUM_STOPS)]
    reached = torch.where(final > 0, first / final, torch.where(first > 0, torch.inf, torch.nan))
    return reached, length, [relative[stop] for stop in stops]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _few_rows(module: nn.RNNBase, inputs: Tensor) -> Tensor | None:
    """(rows, length, features), a copy in the dtype of the weights; the first steps of a long sequence."""
    if not inputs.is_floating_point() or inputs.ndim not in (2, 3):
        return None
    x = inputs.detach()
    if x.ndim == 2:
        x = x[None]
    elif not module.batch_first:
        x = x.transpose(0, 1)
    step = -(-x.shape[0] // MAX_ROWS)
    return x[::step, :MAX_LENGTH].to(_weights(module)[0].dtype, copy=True).contiguous()


def _weights(module: nn.RNNBase) -> list[Tensor]:
    return [weight.detach() for weight in module._flat_weights if weight is not None]


def _forward(module: nn.RNNBase, x: Tensor) -> Tensor:
    weights = _weights(module)
    directions = 2 if module.bidirectional else 1
    zeros = x.new_zeros(module.num_layers * directions, x.shape[0], module.hidden_size)
    # Dropout is 0. Still in "train" mode: cuDNN has no backward pass for anything else.
    rest: tuple[Any, ...] = (weights, module.bias, module.num_layers, 0.0, True, module.bidirectional, True)
    if module.mode == "LSTM":
        hidden = zeros if not module.proj_size else zeros.new_zeros(*zeros.shape[:2], module.proj_size)
        output: Tensor = torch._VF.lstm(x, (hidden, zeros), *rest)[0]
    else:
        run = {"GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}[module.mode]
        output = getattr(torch._VF, run)(x, zeros, *rest)[0]
    return output
