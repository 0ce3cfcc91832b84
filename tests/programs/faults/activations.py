"""Units that say nothing: dead, saturated, linear where they should bend, or all saying the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from faults import data
from faults.program import Job, endless, program
from faults.stacks import cnn, fill, he, mlp, normal, xavier


def _job(model: nn.Module, split: data.Split, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> Job:
    (x, y), val = split
    is_class = not y.is_floating_point()
    loss: nn.Module = nn.CrossEntropyLoss() if is_class else nn.MSELoss()
    return Job(model, optimizer, loss, endless(x, y, 64, seed), steps, val=val, val_every=50, is_accuracy=is_class)


# ----------------------------------------------------------------------------------------------------------------- dead

_DULL = ("underfitting", "vanishing_gradients", "rank_collapse", "loss_spikes", "exploding_gradients")


@program(
    "dead_negative_bias", "dead_relu", also_ok=(*_DULL, "init_scale", "bottleneck_layer"), where="3",
    source="Lu 2019 (dying ReLU): biases that push every unit below zero",
)  # fmt: skip
def _dead_bias(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 64, 5]), he)
    if not fixed:
        nn.init.constant_(model[2].bias, -8.0)  # type: ignore[index]
    return _job(model, data.clusters(), SGD(model.parameters(), 0.02, momentum=0.9), 250, seed)


@program(
    "dead_by_large_steps", {"dead_relu", "lr_too_high"}, also_ok=(*_DULL, "loss_oscillation", "output_logit_growth"),
    source="AUTOTRAINER: dying ReLU by learning rate",
)  # fmt: skip
def _dead_lr(seed: int, fixed: bool) -> Job:
    model = fill(cnn((12, 24), 48, 8), he)
    return _job(model, data.images(), Adam(model.parameters(), 1e-3 if fixed else 0.3), 200, seed)


class _FunctionalNet(nn.Module):
    """ReLUs as functions: there is no module whose output could be recorded."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 5)
        for layer in (self.a, self.b, self.c):
            he(layer.weight)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.b.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(nn.functional.relu(self.b(nn.functional.relu(self.a(x)))))  # type: ignore[no-any-return]


@program(
    "dead_functional_relu", "dead_relu", also_ok=(*_DULL, "init_scale", "bottleneck_layer"),
    source="Lu 2019, with torch.nn.functional.relu",
)  # fmt: skip
def _dead_functional(seed: int, fixed: bool) -> Job:
    model = _FunctionalNet(0.0 if fixed else -8.0)
    return _job(model, data.clusters(), AdamW(model.parameters(), 1e-3), 250, seed)


@program("healthy_sparse_relu")
def _healthy_sparse(seed: int, fixed: bool) -> Job:
    """Four of five outputs are zero at any moment, yet every unit answers to something."""
    model = fill(mlp([20, 128, 64, 5]), he)
    nn.init.constant_(model[0].bias, -0.8)  # type: ignore[index]
    return _job(model, data.clusters(), Adam(model.parameters(), 2e-3), 250, seed)


@program("healthy_wide_relu_few_dead")
def _healthy_few_dead(seed: int, fixed: bool) -> Job:
    """A third of the units of a very wide layer never fires; the others are more than enough."""
    model = fill(mlp([20, 256, 5]), he)
    with torch.no_grad():
        model[0].bias[:80] = -10.0  # type: ignore[index]
    return _job(model, data.clusters(), Adam(model.parameters(), 2e-3), 250, seed)


# ------------------------------------------------------------------------------------------------------------ saturated


@program(
    "saturated_wide_sigmoid", {"saturated_activations", "init_scale"},
    also_ok=("underfitting", "vanishing_gradients", "lr_too_low", "output_logit_growth"),
    source="Glorot 2010: sigmoids driven to their ends by wide weights",
)  # fmt: skip
def _saturated_sigmoid(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 48, 48, 5], nn.Sigmoid), xavier if fixed else normal(8.0))
    return _job(model, data.clusters(), Adam(model.parameters(), 5e-3 if fixed else 1e-3), 300, seed)


@program(
    "saturated_tanh_raw_inputs", {"saturated_activations", "unnormalised_inputs"},
    also_ok=("underfitting", "vanishing_gradients"),
    source="DeepDiagnosis: tanh on features in the hundreds",
)  # fmt: skip
def _saturated_tanh(seed: int, fixed: bool) -> Job:
    (x, y), (xv, yv) = data.clusters()
    scale = torch.ones(20) if fixed else torch.logspace(0, 3, 20)
    split = ((x * scale, y), (xv * scale, yv))
    model = fill(mlp([20, 32, 32, 5], nn.Tanh), xavier)
    return _job(model, split, SGD(model.parameters(), 0.05, momentum=0.9), 250, seed)


@program(
    "saturated_by_large_steps", {"saturated_activations", "lr_too_high"},
    also_ok=("underfitting", "vanishing_gradients", "loss_spikes", "loss_oscillation", "output_logit_growth"),
    source="SageMaker SaturatedActivation: a learning rate that throws tanh units to their ends",
)  # fmt: skip
def _saturated_lr(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 48, 48, 48, 5], nn.Tanh), xavier)
    return _job(model, data.clusters(), SGD(model.parameters(), 0.05 if fixed else 8.0, momentum=0.9), 200, seed)


@program("healthy_sharp_gates")
def _healthy_gates(seed: int, fixed: bool) -> Job:
    """A squeeze-and-excite gate opens and shuts; that is what gates are for."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gate, self.sigmoid = nn.Linear(20, 64), nn.Linear(20, 64), nn.Sigmoid()
            self.head = nn.Linear(64, 5)
            nn.init.normal_(self.gate.weight, 0, 0.7)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.sigmoid(self.gate(x)) * torch.relu(self.body(x)))  # type: ignore[no-any-return]

    model = Gated()
    return _job(model, data.clusters(), Adam(model.parameters(), 3e-3), 250, seed)


# --------------------------------------------------------------------------------------------------------------- linear


def rings(num: int = 900) -> data.Split:
    """Three rings inside each other: no line parts them."""
    g = torch.Generator().manual_seed(11)
    y = torch.randint(3, (num,), generator=g)
    angle = 6.2832 * torch.rand(num, generator=g)
    radius = 0.6 + 0.7 * y + 0.1 * torch.randn(num, generator=g)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    k = int(0.75 * num)
    return (x[:k], y[:k]), (x[k:], y[k:])


@program(
    "linear_stack_rings", "missing_nonlinearity", also_ok=("underfitting", "lr_too_low", "bottleneck_layer"),
    source="UMLAUT: Dense layers without activations",
)  # fmt: skip
def _linear_rings(seed: int, fixed: bool) -> Job:
    model = mlp([2, 24, 24, 3]) if fixed else nn.Sequential(nn.Linear(2, 24), nn.Linear(24, 24), nn.Linear(24, 3))
    return _job(model, rings(), Adam(model.parameters(), 1e-2), 250, seed)


class _ForgotToBend(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 16, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(16 * 16, 48), nn.Linear(48, 8)
        self.bend = nn.functional.relu if fixed else (lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.avg_pool2d(self.bend(self.conv2(self.bend(self.conv1(x)))), 2)
        return self.fc2(self.bend(self.fc1(h.flatten(1))))  # type: ignore[no-any-return]


@program(
    "linear_convolutions", "missing_nonlinearity", also_ok=("underfitting",),
    source="DeepFD: activation left out, functional style",
)  # fmt: skip
def _linear_conv(seed: int, fixed: bool) -> Job:
    model = _ForgotToBend(fixed)
    return _job(model, data.images(), SGD(model.parameters(), 0.02, momentum=0.9), 150, seed)


@program("healthy_logistic_regression")
def _healthy_logistic(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 5))
    return _job(model, data.clusters(), SGD(model.parameters(), 0.1), 200, seed)


class _LowRank(nn.Module):
    """Factorised layers: two Linear in a row on purpose, an activation after the pair."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(20, 8, bias=False), nn.Linear(8, 64)
        self.down2, self.up2 = nn.Linear(64, 8, bias=False), nn.Linear(8, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.up(self.down(x)))
        return self.head(nn.functional.gelu(self.up2(self.down2(h))))  # type: ignore[no-any-return]


@program("healthy_factorised_layers")
def _healthy_low_rank(seed: int, fixed: bool) -> Job:
    model = _LowRank()
    return _job(model, data.clusters(), Adam(model.parameters(), 3e-3), 250, seed)


class _Autoencoder(nn.Module):
    """Linear at its narrow middle, as most are."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, width))
        self.decoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 20))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]


@program("healthy_autoencoder")
def _healthy_autoencoder(seed: int, fixed: bool) -> Job:
    (x, _), (xv, _) = data.clusters()
    model = _Autoencoder()
    return _job(model, ((x, x), (xv, xv)), Adam(model.parameters(), 3e-3), 300, seed)


class _CustomActivation(nn.Module):
    """Swish written by hand: nothing that looks inside torch.nn knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 48), nn.Linear(48, 48), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.b(h / (1 + (-h).exp()))
        return self.c(h * h.abs().clamp(max=1.0))  # type: ignore[no-any-return]


@program("healthy_handwritten_activation")
def _healthy_custom(seed: int, fixed: bool) -> Job:
    model = _CustomActivation()
    return _job(model, data.clusters(), Adam(model.parameters(), 3e-3), 250, seed)


# ----------------------------------------------------------------------------------------------------------- bottleneck


@program(
    "bottleneck_one_unit", "bottleneck_layer", also_ok=_DULL, where="4", source="a layer of one unit between wide ones",
)  # fmt: skip
def _bottleneck(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 64, 64 if fixed else 1, 64, 5], nn.Tanh), xavier)
    return _job(model, data.clusters(spread=1.4), Adam(model.parameters(), 2e-3), 300, seed)


@program(
    "bottleneck_one_unit_images", "bottleneck_layer", also_ok=_DULL, where="5",
    source="one number between two wide parts of an image classifier",
)  # fmt: skip
def _bottleneck_conv(seed: int, fixed: bool) -> Job:
    narrow = 32 if fixed else 1
    model = nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 64, 64), nn.ELU(),
        nn.Linear(64, narrow), nn.ELU(), nn.Linear(narrow, 64), nn.ELU(), nn.Linear(64, 8),
    )  # fmt: skip
    return _job(model, data.images(), AdamW(model.parameters(), 2e-3), 200, seed)


@program("healthy_narrow_everywhere")
def _healthy_narrow(seed: int, fixed: bool) -> Job:
    model = fill(mlp([2, 8, 6, 8, 3], nn.Tanh), xavier)
    return _job(model, rings(), Adam(model.parameters(), 1e-2), 400, seed)


# -------------------------------------------------------------------------------------------------------- low precision


@program(
    "underflow_half_small_loss",
    "low_precision_underflow",
    also_ok=("underfitting", "lr_too_low", "vanishing_gradients"),
)
def _underflow(seed: int, fixed: bool) -> Job:
    """Half precision with a small loss and no loss scaling: most gradients are rounded to zero."""
    (x, y), (xv, yv) = data.clusters()
    model = fill(mlp([20, 64, 64, 5]), he).half()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.float(), target) * (1.0 if fixed else 2e-5)

    optimizer = SGD(model.parameters(), 0.05 if fixed else 0.5)
    return Job(model, optimizer, loss, endless(x.half(), y, 64, seed), 150, val=(xv.half(), yv), val_every=50)


@program(
    "overflow_half_activations",
    "low_precision_overflow",
    also_ok=("nan_inf", "init_scale", "exploding_gradients", "lr_too_high", "loss_spikes", "output_logit_growth"),
)
def _overflow(seed: int, fixed: bool) -> Job:
    """Half precision whose hidden values come within a factor of two of 65504."""
    (x, y), (xv, yv) = data.clusters()
    model = fill(mlp([20, 64, 64, 5]), he).half()
    if not fixed:
        model[2].weight.data.mul_(4000.0)  # type: ignore[index]
        model[4].weight.data.div_(4000.0)  # type: ignore[index]
    optimizer = SGD(model.parameters(), 0.05 if fixed else 1e-4)
    batches = endless(x.half(), y, 64, seed)
    return Job(model, optimizer, nn.CrossEntropyLoss(), batches, 100, val=(xv.half(), yv), val_every=50)


@program("healthy_bfloat16")
def _healthy_bfloat16(seed: int, fixed: bool) -> Job:
    (x, y), (xv, yv) = data.clusters()
    model = fill(mlp([20, 64, 64, 5]), he).bfloat16()
    optimizer = SGD(model.parameters(), 0.1)
    batches = endless(x.bfloat16(), y, 64, seed)
    return Job(model, optimizer, nn.CrossEntropyLoss(), batches, 150, val=(xv.bfloat16(), yv), val_every=50)
