"""Gradients that vanish or explode on their way through the depth, and deep models in which they do not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from faults import data
from faults.program import Batch, Job, endless, program
from faults.stacks import LanguageModel, ResidualBlock, cnn, fill, he, mlp, normal, token_loss, xavier


def _classify(
    model: nn.Module, split: data.Split, lr: float, steps: int, seed: int, *, adam: bool = True, scale: float = 1.0
) -> Job:
    (x, y), val = split
    optimizer = Adam(model.parameters(), lr) if adam else SGD(model.parameters(), lr, momentum=0.9)
    loss = nn.CrossEntropyLoss() if scale == 1.0 else _Scaled(scale)
    return Job(model, optimizer, loss, endless(x, y, 64, seed), steps, val=val, val_every=50, is_accuracy=True)


class _Scaled(nn.CrossEntropyLoss):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.scale * super().forward(input, target)


class Exp(nn.Module):
    """An activation that should never have been one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


# ------------------------------------------------------------------------------------------------------------ vanishing

_STUCK = ("underfitting", "bottleneck_layer", "rank_collapse", "lr_too_low")


@program(
    "vanish_sigmoid_deep_clusters",
    "vanishing_gradients",
    also_ok=_STUCK,
    source="AUTOTRAINER: a deep stack of Dense sigmoid layers",
)
def _sigmoid_deep(seed: int, fixed: bool) -> Job:
    model = mlp([20, *[24] * 9, 5], nn.GELU if fixed else nn.Sigmoid)
    return _classify(fill(model, he if fixed else xavier), data.clusters(), 1e-3, 250, seed)


@program(
    "vanish_sigmoid_conv_images",
    "vanishing_gradients",
    also_ok=(*_STUCK, "saturated_activations"),
    source="AUTOTRAINER: LeNet with sigmoids and many Dense layers",
)
def _sigmoid_conv(seed: int, fixed: bool) -> Job:
    activation = nn.ReLU if fixed else nn.Sigmoid
    layers: list[nn.Module] = []
    channels = 1
    for _ in range(6):
        layers += [nn.Conv2d(channels, 12, 3, padding=1), *([nn.BatchNorm2d(12)] if fixed else []), activation()]
        channels = 12
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(192, 8))
    return _classify(fill(model, he), data.images(), 0.05, 150, seed, adam=False)


@program(
    "vanish_relu_default_init",
    {"vanishing_gradients", "init_scale"},
    also_ok=(*_STUCK, "residual_decay"),
    source="He 2015: default initialisation is too small for deep rectifiers",
)
def _relu_deep(seed: int, fixed: bool) -> Job:
    model: nn.Module
    if fixed:
        model = nn.Sequential(nn.Linear(20, 32), *[ResidualBlock(32) for _ in range(10)], nn.Linear(32, 5))
    else:
        model = mlp([20, *[32] * 22, 5])
    return _classify(model, data.clusters(), 1e-3, 200, seed)


@program(
    "vanish_tanh_tiny_weights",
    {"vanishing_gradients", "init_scale"},
    also_ok=_STUCK,
    source="AUTOTRAINER: RandomUniform(-0.05, 0.05) in a deep stack; Glorot 2010",
)
def _tanh_tiny(seed: int, fixed: bool) -> Job:
    (x, y), val = data.regression()
    model = fill(mlp([8, *[24] * 11, 1], nn.Tanh), xavier if fixed else normal(0.03))
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return Job(model, optimizer, nn.MSELoss(), endless(x, y, 50, seed), 300, val=val, val_every=50)


@program("healthy_deep_tanh_xavier")
def _healthy_tanh(seed: int, fixed: bool) -> Job:
    """Ten tanh layers whose gradients survive: depth alone is not a fault."""
    return _classify(fill(mlp([20, *[32] * 9, 5], nn.Tanh), xavier), data.clusters(), 1e-3, 300, seed)


@program("healthy_deep_residual_tiny_loss")
def _healthy_residual(seed: int, fixed: bool) -> Job:
    """Twelve residual blocks and a loss of 1e-4: every gradient is tiny, none vanishes."""
    model = nn.Sequential(
        nn.Linear(20, 32), *[ResidualBlock(32) for _ in range(12)], nn.LayerNorm(32), nn.Linear(32, 5)
    )
    return _classify(model, data.clusters(), 1e-3, 200, seed, scale=1e-4)


@program("healthy_conv_batchnorm_deep")
def _healthy_batchnorm(seed: int, fixed: bool) -> Job:
    layers: list[nn.Module] = []
    channels = 1
    for _ in range(7):
        layers += [nn.Conv2d(channels, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
        channels = 12
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(192, 8))
    return _classify(model, data.images(), 0.02, 150, seed, adam=False)


@program("healthy_sigmoid_shallow")
def _healthy_sigmoid(seed: int, fixed: bool) -> Job:
    """Two sigmoid layers: the first gets a tenth of the gradient and learns all the same."""
    return _classify(fill(mlp([20, 48, 48, 5], nn.Sigmoid), xavier), data.clusters(), 5e-3, 300, seed)


@program("healthy_solved_task")
def _healthy_solved(seed: int, fixed: bool) -> Job:
    """The loss goes to nothing, and with it every gradient."""
    split = data.clusters(spread=0.3)
    return _classify(fill(mlp([20, 64, 64, 5]), he), split, 3e-3, 300, seed)


@program("healthy_frozen_features_small_head")
def _healthy_transfer(seed: int, fixed: bool) -> Job:
    """Transfer learning: the body is frozen, only the head and the last layer learn."""
    model = fill(mlp([20, 96, 96, 96, 5]), he)
    for parameter in model[0:3].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    (x, y), val = data.clusters()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)
    return Job(model, optimizer, nn.CrossEntropyLoss(), endless(x, y, 64, seed), 200, val=val, val_every=50)


# ------------------------------------------------------------------------------------------------------------ exploding

_BURST = ("nan_inf", "lr_too_high", "loss_spikes", "dead_relu", "loss_oscillation", "unnormalised_targets")


@program(
    "explode_exp_activation",
    {"exploding_gradients", "nan_inf"},
    also_ok=(*_BURST, "init_scale", "underfitting", "output_logit_growth"),
    source="AUTOTRAINER: Dense layers with exponential activations",
)
def _exp(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, *[16] * 4, 5], nn.ELU if fixed else Exp), xavier if fixed else normal(0.12))
    return _classify(model, data.clusters(), 0.02, 200, seed, adam=False)


@program(
    "explode_wide_init_conv",
    {"exploding_gradients", "init_scale"},
    also_ok=(*_BURST, "output_logit_growth", "underfitting"),
    source="DeepDiagnosis: RandomNormal(stddev=1) in a convolutional net",
)
def _conv_wide(seed: int, fixed: bool) -> Job:
    model = fill(cnn((16, 24, 32), 48, 8), he if fixed else normal(0.8))
    return _classify(model, data.images(), 0.01, 200, seed, adam=False)


@program(
    "explode_wide_init_regression",
    {"exploding_gradients", "init_scale"},
    also_ok=(*_BURST, "output_logit_growth", "underfitting"),
    source="Glorot 2010; weights drawn five times too wide",
)
def _regression_wide(seed: int, fixed: bool) -> Job:
    (x, y), val = data.regression()

    def wide(weight: Tensor) -> None:
        he(weight)
        if not fixed:
            weight.data.mul_(4.0)

    model = fill(mlp([8, *[48] * 5, 1]), wide)
    optimizer = SGD(model.parameters(), 0.03, momentum=0.9)
    return Job(model, optimizer, nn.MSELoss(), endless(x, y, 50, seed), 300, val=val, val_every=50, clip=1.0)


@program("healthy_loss_times_1000")
def _healthy_large_loss(seed: int, fixed: bool) -> Job:
    """Gradient norms in the thousands because the loss is; Adam does not care."""
    return _classify(fill(mlp([20, 64, 64, 5]), he), data.clusters(), 1e-3, 250, seed, scale=1e3)


@program("healthy_sum_of_tokens")
def _healthy_tokens(seed: int, fixed: bool) -> Job:
    """A clipped language model whose loss is summed over the positions of a sequence on purpose."""
    model = LanguageModel()
    optimizer = AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return token_loss(logits, targets) * targets.shape[1]

    return Job(model, optimizer, loss, data.language(seed), 200, clip=1.0)


@program("healthy_occasional_large_gradient")
def _healthy_rare(seed: int, fixed: bool) -> Job:
    """One hard batch in forty has a gradient ten times the usual; clipping takes care of it."""
    (x, y), val = data.clusters()
    model = fill(mlp([20, 64, 64, 5]), he)

    def batches() -> Iterator[Batch]:
        for number, (a, b) in enumerate(endless(x, y, 64, seed)):
            yield (1.5 * a, b) if number % 40 == 39 else (a, b)

    return Job(
        model,
        SGD(model.parameters(), 0.05),
        nn.functional.cross_entropy,
        batches(),
        200,
        clip=2.0,
        val=val,
        val_every=50,
    )
