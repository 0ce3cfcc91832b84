"""Learning rates that are too high, too low, die away too soon or never arrive, and healthy ones that look like it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, StepLR

from faults import data
from faults.gpt import GPT, Patches
from faults.program import Batch, Job, endless, program
from faults.stacks import cnn, fill, he, mlp, normal, token_loss, xavier

HIGH = "lr_too_high"
LOW = "lr_too_low"
_BROKEN = (
    *("loss_oscillation", "exploding_gradients", "dead_relu", "nan_inf", "loss_spikes", "underfitting"),
    *("saturated_activations", "loss_divergence", "constant_output", "output_logit_growth", "attention_logit_growth"),
    *("attention_entropy_collapse", "vanishing_gradients", "rank_collapse", "gradient_overflow"),
)
_SLOW = ("underfitting", "loss_plateau", "constant_output")


def _job(
    model: nn.Module,
    optimizer: Optimizer,
    split: data.Split,
    seed: int,
    *,
    steps: int = 200,
    batch: int = 50,
    loss: Callable[[Any, Any], Tensor] | None = None,
    **options: Any,
) -> Job:
    (x, y), val = split
    is_class = y.dtype == torch.long
    loss = loss or (cross_entropy if is_class else mse_loss)
    every = steps // 5
    return Job(
        model, optimizer, loss, endless(x, y, batch, seed), steps,
        val=val, val_every=every, is_accuracy=is_class, **options,
    )  # fmt: skip


def _language(seed: int) -> Iterator[Batch]:
    return data.language(seed, batch=16, length=16)


# ----------------------------------------------------------------------------------------------------------- too high


@program("lr_high_adam_mlp", HIGH, also_ok=_BROKEN, source="AUTOTRAINER, DeepFD: Adam with lr 0.5")
def _high_adam(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 32, 5]), he)
    return _job(model, Adam(model.parameters(), 0.003 if fixed else 0.5), data.clusters(), seed)


@program("lr_high_momentum_cnn", HIGH, also_ok=_BROKEN, source="TheDeepChecker high_lr")
def _high_momentum(seed: int, fixed: bool) -> Job:
    model = fill(cnn((8, 16), 32, 8), he)
    optimizer = SGD(model.parameters(), 0.02 if fixed else 1.5, momentum=0.9)
    return _job(model, optimizer, data.images(), seed)


@program("lr_high_gpt", HIGH, also_ok=_BROKEN, source="Wortsman 2023: learning rates far above the optimum")
def _high_gpt(seed: int, fixed: bool) -> Job:
    model = GPT()
    optimizer = AdamW(model.parameters(), 0.003 if fixed else 0.2, betas=(0.9, 0.95))
    return Job(model, optimizer, token_loss, _language(seed), 150, clip=1.0)


@program("lr_high_regression", HIGH, also_ok=_BROKEN, source="DeepLocalize: SGD on a regression, diverging")
def _high_regression(seed: int, fixed: bool) -> Job:
    model = mlp([6, 32, 1], nn.Tanh)
    return _job(model, SGD(model.parameters(), 0.05 if fixed else 8.0), data.slopes(), seed)


class _Reader(nn.Module):
    """A recurrent network whose last state is read."""

    def __init__(self, cell: Callable[..., nn.Module], inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.cell, self.head = cell(inputs, width, batch_first=True), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cell(x)[0][:, -1])


@program("lr_high_lstm", HIGH, also_ok=_BROKEN, source="DeepFD: recurrent network with Adam at lr 3")
def _high_lstm(seed: int, fixed: bool) -> Job:
    model = _Reader(nn.LSTM, 4, 32, 4)
    optimizer = Adam(model.parameters(), 0.005 if fixed else 3.0)
    return Job(model, optimizer, cross_entropy, data.recall(seed, length=12), 200, clip=1.0)


@program("lr_high_patches", HIGH, also_ok=_BROKEN, source="vision transformer with Adam at lr 0.1")
def _high_patches(seed: int, fixed: bool) -> Job:
    model = Patches()
    return _job(model, Adam(model.parameters(), 0.003 if fixed else 0.2), data.images(), seed)


@program("lr_high_late", HIGH, also_ok=_BROKEN, source="momentum at the edge: it learns, then falls apart")
def _high_late(seed: int, fixed: bool) -> Job:
    model = mlp([20, 96, 48, 5])
    optimizer = SGD(model.parameters(), 0.05 if fixed else 1.0, momentum=0.9)
    return _job(model, optimizer, data.clusters(), seed, steps=300, batch=32)


# ------------------------------------------------------------------------------------------------------------ too low


@program("lr_low_sgd_mlp", LOW, also_ok=_SLOW, source="TheDeepChecker low_lr: update ratio below 1e-4")
def _low_sgd(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 48, 24, 5]), he)
    return _job(model, SGD(model.parameters(), 0.1 if fixed else 1e-5), data.clusters(), seed)


@program("lr_low_adam_gpt", LOW, also_ok=_SLOW, source="a fine-tuning rate used from scratch")
def _low_gpt(seed: int, fixed: bool) -> Job:
    model = GPT()
    return Job(model, AdamW(model.parameters(), 0.003 if fixed else 5e-6), token_loss, _language(seed), 150)


@program("lr_low_adam_regression", LOW, also_ok=_SLOW, source="AUTOTRAINER slow convergence")
def _low_regression(seed: int, fixed: bool) -> Job:
    model = mlp([6, 48, 24, 1])
    return _job(model, Adam(model.parameters(), 0.003 if fixed else 2e-6), data.slopes(), seed, steps=250)


@program("lr_low_momentum_cnn", LOW, also_ok=_SLOW, source="DeepCrime change of learning rate")
def _low_cnn(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    return _job(model, SGD(model.parameters(), 0.05 if fixed else 2e-5, momentum=0.9), data.images(), seed)


@program("lr_low_lstm", LOW, also_ok=_SLOW, source="recurrent network with Adam at lr 1e-6")
def _low_lstm(seed: int, fixed: bool) -> Job:
    model = _Reader(nn.GRU, 4, 32, 4)
    optimizer = Adam(model.parameters(), 0.005 if fixed else 2e-6)
    return Job(model, optimizer, cross_entropy, data.recall(seed, length=12), 200)


# ---------------------------------------------------------------------------------------------------------- schedules


@program(
    "lr_decay_per_step", "lr_decay_too_fast", also_ok=_SLOW, source="ExponentialLR stepped per batch, not per epoch"
)
def _decay_exponential(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = ExponentialLR(optimizer, 0.999 if fixed else 0.8)
    return _job(model, optimizer, data.images(), seed, scheduler=scheduler)


@program("lr_decay_steplr", "lr_decay_too_fast", also_ok=_SLOW, source="StepLR(step_size=10) meant in epochs")
def _decay_steps(seed: int, fixed: bool) -> Job:
    model = GPT()
    optimizer = AdamW(model.parameters(), 0.003)
    scheduler = StepLR(optimizer, 100 if fixed else 3, 0.3)
    return Job(model, optimizer, token_loss, _language(seed), 180, scheduler=scheduler)


class _PostNorm(nn.Module):
    """A deep encoder with the norms after the residual sums, as in 2017."""

    def __init__(self, layers: int, *, norm_first: bool = False, width: int = 32, vocabulary: int = 24) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=norm_first)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.body(self.tokens(x) + self.places.weight[: x.shape[1]], mask=mask, is_causal=True))


def _warm(optimizer: Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


@program("warmup_missing_postnorm", "missing_warmup", also_ok=(HIGH, *_SLOW, *_BROKEN), source="Xiong 2020")
def _warmup_missing(seed: int, fixed: bool) -> Job:
    model = _PostNorm(8)
    optimizer = Adam(model.parameters(), 0.01, betas=(0.9, 0.98))
    scheduler = _warm(optimizer, 60) if fixed else None
    return Job(model, optimizer, token_loss, _language(seed), 150, scheduler=scheduler, clip=1.0)


@program("lr_zero_schedule", "lr_not_applied", also_ok=(LOW, *_SLOW), source="warm-up by integer division: always 0")
def _zero_schedule(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 5])
    optimizer = Adam(model.parameters(), 0.005)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 20 if fixed else step // 100000))
    return _job(model, optimizer, data.clusters(), seed, scheduler=scheduler)


@program("lr_zero_group", "lr_not_applied", also_ok=(LOW, *_SLOW), source="the learning rate left at 0 after a restart")
def _zero_group(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    optimizer = SGD(model.parameters(), 0.05 if fixed else 0.0, momentum=0.9)
    return _job(model, optimizer, data.images(), seed, steps=120)


# ---------------------------------------------------------------------------------------- healthy, though it looks odd


@program("healthy_rmsprop_first_step", source="RMSprop's first update is ten times its learning rate")
def _rmsprop(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 5], nn.GELU)
    return _job(model, RMSprop(model.parameters(), 0.01), data.clusters(), seed)


@program("healthy_softmax_regression_lr1", source="a convex problem bears a large learning rate")
def _softmax_regression(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(nn.Linear(20, 5))
    return _job(model, SGD(model.parameters(), 0.5), data.clusters(), seed)


@program("healthy_small_init_no_warmup", source="weights of 0.02: the first update is as large as the weights")
def _small_init(seed: int, fixed: bool) -> Job:
    return Job(model := GPT(), AdamW(model.parameters(), 0.01), token_loss, _language(seed), 180, clip=1.0)


@program("healthy_cosine_to_zero", source="the learning rate ends at 0, as planned")
def _cosine(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step, 200) / 200)))
    return _job(model, optimizer, data.images(), seed, scheduler=scheduler)


@program("healthy_one_cycle", source="a peak learning rate that would be too high from the start")
def _one_cycle(seed: int, fixed: bool) -> Job:
    model = mlp([20, 64, 32, 5], norm=True)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    return _job(model, optimizer, data.clusters(), seed, scheduler=OneCycleLR(optimizer, 0.6, total_steps=201))


@program("healthy_long_warmup", source="for the first third the learning rate is tiny on purpose")
def _long_warmup(seed: int, fixed: bool) -> Job:
    model = GPT()
    optimizer = AdamW(model.parameters(), 0.004)
    return Job(model, optimizer, token_loss, _language(seed), 200, scheduler=_warm(optimizer, 70), clip=1.0)


def _noisy(split: data.Split, seed: int) -> data.Split:
    """A fifth of the labels drawn at random: the loss has a high floor."""
    (x, y), val = split
    g = torch.Generator().manual_seed(seed)
    other = torch.randint(int(y.max()) + 1, y.shape, generator=g)
    return (x, torch.where(torch.rand(len(y), generator=g) < 0.2, other, y)), val


@program("healthy_low_rate_fine_tuning", source="a trained model goes on at a tiny learning rate: little changes")
def _fine_tuning(seed: int, fixed: bool) -> Job:
    split = _noisy(data.clusters(), seed)
    model = fill(mlp([20, 48, 24, 5]), xavier)
    optimizer = Adam(model.parameters(), 0.005)
    (x, y), _ = split
    for (a, b), _ in zip(endless(x, y, 64, seed), range(150), strict=False):
        optimizer.zero_grad()
        cross_entropy(model(a), b).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _job(model, Adam(model.parameters(), 2e-5), split, seed)


def _drawn(seed: int, noise: float) -> Iterator[Batch]:
    """A linear function under noise, of endless fresh samples."""
    g = torch.Generator().manual_seed(100 + seed)
    w = torch.linspace(-1, 1, 8)[:, None]
    while True:
        x = torch.randn(64, 8, generator=g)
        yield x, x @ w + noise * torch.randn(64, 1, generator=g)


@program("healthy_noise_floor_small_steps", source="most of the loss is noise that nobody can learn")
def _noise_floor(seed: int, fixed: bool) -> Job:
    model = fill(mlp([8, 32, 1], nn.Tanh), normal(0.1))
    return Job(model, Adam(model.parameters(), 0.002), mse_loss, _drawn(seed, 2.0), 250)
