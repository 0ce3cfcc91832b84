"""Losses that spike, swing, stand still or run away, and healthy ones that are merely noisy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer

from faults import data
from faults.gpt import GPT
from faults.program import Batch, Job, endless, program
from faults.stacks import cnn, fill, he, mlp, token_loss

_SPIKES = ("unnormalised_inputs", "exploding_gradients", "loss_spikes", "adam_second_moment_underestimate")


def _job(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[Batch],
    split: data.Split,
    steps: int = 250,
    **options: Any,
) -> Job:
    (_, y), val = split
    is_class = y.dtype == torch.long
    loss = cross_entropy if is_class else mse_loss
    return Job(model, optimizer, loss, batches, steps, val=val, val_every=steps // 5, is_accuracy=is_class, **options)


def _spoilt(batches: Iterator[Batch], fixed: bool, *, every: int, scale: float) -> Iterator[Batch]:
    """Now and then a batch that was not scaled like the others."""
    for step, (x, y) in enumerate(batches):
        yield (x * scale if not fixed and step >= 40 and step % every == every - 1 else x), y


# ---------------------------------------------------------------------------------------------------------- bad batches


@program("bad_batches_scale_mlp", {"bad_batches", "loss_spikes"}, also_ok=_SPIKES, source="PaLM, OLMo 2: bad batches")
def _bad_scale(seed: int, fixed: bool) -> Job:
    split = data.clusters(spread=2.0)
    model = fill(mlp([20, 48, 24, 5]), he)
    batches = _spoilt(endless(*split[0], 64, seed), fixed, every=30, scale=100.0)
    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), batches, split, clip=1.0)


@program("bad_batches_regression", {"bad_batches", "loss_spikes"}, also_ok=_SPIKES, source="targets in other units")
def _bad_targets(seed: int, fixed: bool) -> Job:
    split = data.slopes()
    model = mlp([6, 48, 24, 1])

    def batches() -> Iterator[Batch]:
        for step, (x, y) in enumerate(endless(*split[0], 50, seed)):
            yield x, (y * 60.0 if not fixed and step >= 60 and step % 37 == 0 else y)

    return _job(model, Adam(model.parameters(), 0.003), batches(), split, clip=1.0)


@program("bad_batches_few_in_gpt", {"bad_batches", "loss_spikes"}, also_ok=_SPIKES, source="OLMo 2: garbage documents")
def _bad_tokens(seed: int, fixed: bool) -> Job:
    model = GPT()

    def batches() -> Iterator[Batch]:
        stream = data.language(seed, batch=16, length=16)
        for step, (x, y) in enumerate(stream):
            is_garbage = not fixed and step >= 90 and step % 20 == 0
            yield (x, x.flip(1) * 0) if is_garbage else (x, y)

    return Job(model, AdamW(model.parameters(), 0.003), token_loss, batches(), 180, clip=1.0)


# ------------------------------------------------------------------------------------------------------------- swinging


@program(
    "oscillation_sgd",
    {"loss_oscillation", "lr_too_high"},
    also_ok=("loss_spikes", "exploding_gradients", "underfitting", "loss_divergence", "saturated_activations"),
    source="AUTOTRAINER oscillating loss on blobs: each step jumps across the valley",
)
def _oscillation(seed: int, fixed: bool) -> Job:
    split = data.clusters(classes=3, spread=2.5)
    model = mlp([20, 16, 3], nn.Tanh)
    return _job(model, SGD(model.parameters(), 0.3 if fixed else 10.0), endless(*split[0], 32, seed), split)


@program(
    "oscillation_momentum",
    {"loss_oscillation", "lr_too_high"},
    also_ok=("loss_spikes", "exploding_gradients", "underfitting", "loss_divergence", "saturated_activations"),
    source="AUTOTRAINER oscillating loss: a momentum of 0.99 carries the weights past the valley and back",
)
def _oscillation_momentum(seed: int, fixed: bool) -> Job:
    split = data.clusters(classes=3, spread=2.5)
    model = mlp([20, 16, 3], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.05 if fixed else 1.5, momentum=0.9 if fixed else 0.99)
    return _job(model, optimizer, endless(*split[0], 128, seed), split)


# ------------------------------------------------------------------------------------------------ healthy, yet it jumps


@program("healthy_tiny_batches", source="batches of four: the loss jumps about, the model learns")
def _tiny_batches(seed: int, fixed: bool) -> Job:
    split = data.clusters(spread=2.0)
    model = mlp([20, 32, 5])
    return _job(model, SGD(model.parameters(), 0.05), endless(*split[0], 4, seed), split, 400)


@program("healthy_heavy_tails", source="targets with heavy tails: some batches are harder, none is wrong")
def _heavy_tails(seed: int, fixed: bool) -> Job:
    (x, y), val = data.slopes()
    g = torch.Generator().manual_seed(seed)
    split = (x, y * (1.0 + 0.5 * torch.randn(y.shape, generator=g).abs())), val
    model = mlp([6, 48, 1])
    return _job(model, Adam(model.parameters(), 0.003), endless(*split[0], 32, seed), split)


@program("healthy_near_zero_loss", source="a loss of nearly zero doubles at the least cause")
def _near_zero(seed: int, fixed: bool) -> Job:
    split = data.clusters()
    model = mlp([20, 64, 5])
    return _job(model, Adam(model.parameters(), 0.01), endless(*split[0], 16, seed), split, 400)


@program("healthy_curriculum", source="the data become harder half-way: the loss rises once, and falls again")
def _curriculum(seed: int, fixed: bool) -> Job:
    easy, hard = data.images(noise=0.3), data.images(noise=0.8)
    model = cnn((8, 16), 32, 8)

    def batches() -> Iterator[Batch]:
        a, b = endless(*easy[0], 50, seed), endless(*hard[0], 50, seed)
        for step in range(10**9):
            yield next(a) if step < 120 else next(b)

    return _job(model, Adam(model.parameters(), 0.003), batches(), hard)


@program("healthy_alternating_tasks", source="every other batch comes from a harder task: the loss goes up and down")
def _alternating(seed: int, fixed: bool) -> Job:
    easy, hard = data.clusters(), data.clusters(spread=3.0)
    model = mlp([20, 48, 5])

    def batches() -> Iterator[Batch]:
        a, b = endless(*easy[0], 50, seed), endless(*hard[0], 50, seed)
        while True:
            yield next(a)
            yield next(b)

    return _job(model, Adam(model.parameters(), 0.003), batches(), easy)
