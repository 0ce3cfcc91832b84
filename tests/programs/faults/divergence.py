"""Losses that run away because steps are too large, as newcomers meet them, with every outcome: NaN, infinity, or only
a loss that ends far above its start; and NaN that comes from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, huber_loss, mse_loss, smooth_l1_loss
from torch.optim import SGD, Adam, Optimizer, RMSprop

from faults.gpt import GPT
from faults.program import Batch, Job, program
from faults.stacks import cnn, mlp, token_loss

HIGH: Final = "lr_too_high"
BROKEN: Final = (
    *("nan_inf", "exploding_gradients", "loss_spikes", "loss_oscillation", "dead_relu", "underfitting"),
    *("loss_divergence", "constant_output", "output_logit_growth", "attention_logit_growth", "low_precision_overflow"),
    *("attention_entropy_collapse", "saturated_activations", "rank_collapse", "vanishing_gradients"),
)


def _slopes(seed: int, width: int, *, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Iterator[Batch]:
    """Batches of a linear function with a little noise."""
    g = torch.Generator().manual_seed(50 + seed)
    w = torch.randn(width, 1, generator=g)
    while True:
        x = spread * torch.randn(32, width, generator=g)
        yield x.to(dtype), (x @ w + 0.1 * torch.randn(32, 1, generator=g)).to(dtype)


def _classes(seed: int) -> Iterator[Batch]:
    g = torch.Generator().manual_seed(60 + seed)
    centres = 2 * torch.randn(4, 10, generator=g)
    while True:
        y = torch.randint(4, (32,), generator=g)
        yield centres[y] + torch.randn(32, 10, generator=g), y


def _pictures(seed: int) -> Iterator[Batch]:
    g = torch.Generator().manual_seed(70 + seed)
    patterns = torch.randn(8, 1, 8, 8, generator=g)
    while True:
        y = torch.randint(8, (32,), generator=g)
        yield patterns[y] + torch.randn(32, 1, 8, 8, generator=g), y


def _tokens(seed: int) -> Iterator[Batch]:
    g = torch.Generator().manual_seed(80 + seed)
    while True:
        start, stride = torch.randint(24, (16, 1), generator=g), torch.randint(1, 4, (16, 1), generator=g)
        rows = (start + stride * torch.arange(17)) % 24
        yield rows[:, :-1], rows[:, 1:]


def _regression(
    name: str,
    lr: float,
    steps: int,
    *,
    loss: Callable[..., Tensor] = mse_loss,
    make: Callable[..., Optimizer] = SGD,
    good: float = 0.01,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    """Register an 8-16-1 network with this learning rate; its twin has a good one."""

    @program(name, HIGH, also_ok=BROKEN, source="newcomers' programs: a regression whose loss becomes NaN")
    def _program(seed: int, fixed: bool) -> Job:
        model = mlp([8, 16, 1]).to(dtype)
        optimizer = make(model.parameters(), lr=good if fixed else lr, **options)
        return Job(model, optimizer, loss, _slopes(seed, 8, dtype=dtype), 200 if fixed else steps)


for _lr in (1.0, 2.0, 5.0, 20.0):
    for _momentum, _steps in ((0.0, 60), (0.0, 200), (0.9, 400)):
        _regression(f"diverge_sgd_{_lr:g}_m{_momentum:g}_{_steps}", _lr, _steps, momentum=_momentum)
_regression("diverge_adam", 50.0, 120, make=Adam)
_regression("diverge_rmsprop", 10.0, 120, make=RMSprop, good=0.003)
_regression("diverge_huber", 20.0, 200, loss=huber_loss, momentum=0.9, good=0.03)
_regression("diverge_smooth_l1", 1000.0, 100, loss=smooth_l1_loss, good=0.05)
_regression("diverge_bfloat16", 2.0, 100, dtype=torch.bfloat16)
_regression("diverge_edge", 0.3, 120, momentum=0.9)


@program("diverge_classifier_50", HIGH, also_ok=BROKEN, source="newcomers' programs: a classifier at lr 50")
def _classifier(seed: int, fixed: bool) -> Job:
    model = mlp([10, 32, 4])
    return Job(model, SGD(model.parameters(), 0.05 if fixed else 50.0), cross_entropy, _classes(seed), 150)


def _linear(name: str, lr: float, steps: int) -> None:
    @program(name, HIGH, also_ok=BROKEN, source="newcomers' programs: linear regression, ten weights")
    def _program(seed: int, fixed: bool) -> Job:
        model = nn.Linear(10, 1)
        optimizer = SGD(model.parameters(), 0.02 if fixed else lr)
        return Job(model, optimizer, lambda out, y: (out - y).square().mean(), _slopes(seed, 10, spread=2.0), steps)


_linear("diverge_linear_02", 0.3, 300)
_linear("diverge_linear_1", 1.0, 300)
_linear("diverge_linear_still_finite", 0.3, 40)


@program("diverge_cnn_batch_norm", HIGH, also_ok=BROKEN, source="batch norm keeps the values finite, not the loss")
def _conv(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    optimizer = SGD(model.parameters(), 0.02 if fixed else 100.0, momentum=0.9)
    return Job(model, optimizer, cross_entropy, _pictures(seed), 120)


@program("diverge_gpt_sgd", HIGH, also_ok=BROKEN, source="a transformer with SGD at lr 20")
def _gpt(seed: int, fixed: bool) -> Job:
    model = GPT()
    optimizer = SGD(model.parameters(), 0.1 if fixed else 20.0, momentum=0.9)
    return Job(model, optimizer, token_loss, _tokens(seed), 120)


@program("diverge_rate_raised", HIGH, also_ok=BROKEN, source="a schedule with a wrong milestone")
def _raised(seed: int, fixed: bool) -> Job:
    model = mlp([8, 32, 1])
    optimizer = SGD(model.parameters(), 0.01)
    later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 120 or fixed else 40.0)
    return Job(model, optimizer, mse_loss, _slopes(seed, 8), 200, scheduler=later)


class _Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().log() * 0.01  # - infinity where x is not positive: NaN in the next layer


@program("nan_of_a_module_at_rmsprops_rate", "nan_inf", twin=False, source="log of 0, under a large first update")
def _module_nan(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), _Log(), nn.Linear(16, 1))
    return Job(model, RMSprop(model.parameters(), 0.05), mse_loss, _slopes(seed, 8), 60)


def _spoiled(seed: int) -> Iterator[Batch]:
    for step, (x, y) in enumerate(_slopes(seed, 8)):
        yield (x / 0 if step == 40 else x), y


@program("nan_of_the_data_at_rmsprops_rate", "nan_inf", twin=False, source="one bad batch, under large first updates")
def _data_nan(seed: int, fixed: bool) -> Job:
    model = mlp([8, 16, 1])
    return Job(model, RMSprop(model.parameters(), 0.05), mse_loss, _spoiled(seed), 80)
