"""Fine-tuning with low-rank adapters: dead ones, too small ones, too loud ones, and healthy neighbours."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.data import Split
from faults.program import Job, endless, program

STUCK = (
    "vanishing_gradients",
    "symmetric_init",
    "lr_too_low",
    "underfitting",
    "frozen_layers",
    "detached_graph",
    "dead_relu",
)
LOUD = (
    "lr_too_high",
    "loss_oscillation",
    "loss_spikes",
    "exploding_gradients",
    "init_scale",
    "underfitting",
    "nan_inf",
)


class Adapted(nn.Module):
    """A frozen linear layer plus `scaling * B A`."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float, *, zero_a: bool = False) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        if zero_a:
            nn.init.zeros_(self.lora_A)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.scaling * (x @ self.lora_A.t() @ self.lora_B.t())


class AdaptedByLayers(nn.Module):
    """The same with layers for A and B, as PEFT has them."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float, *, zero_a: bool = False) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        a, b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(b.weight)
        if zero_a:
            nn.init.zeros_(a.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": a}), nn.ModuleDict({"default": b})
        self.scaling = scaling

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + self.scaling * self.lora_B["default"](self.lora_A["default"](x))


def _teacher(widths: tuple[int, ...], shift_rank: int) -> tuple[list[nn.Linear], Split]:
    """Layers that were trained for something, and a task that differs from it by a low-rank change of each layer."""
    g = torch.Generator().manual_seed(31)
    layers, x = [], torch.randn(1600, widths[0], generator=g)
    y = x
    for fan_in, fan_out in pairwise(widths):
        layer = nn.Linear(fan_in, fan_out)
        layer.weight.data = torch.randn(fan_out, fan_in, generator=g) / math.sqrt(fan_in)
        layer.bias.data.zero_()
        layers.append(layer)
        change = torch.randn(fan_out, shift_rank, generator=g) @ torch.randn(shift_rank, fan_in, generator=g)
        weight = layer.weight.detach() + change / math.sqrt(shift_rank * fan_in)
        y = y @ weight.t()
        y = y.tanh() if fan_out != widths[-1] else y
    return layers, ((x[:1200], y[:1200]), (x[1200:], y[1200:]))


def _job(
    seed: int,
    kind: type[Adapted | AdaptedByLayers],
    *,
    rank: int,
    scaling: float = 1.0,
    zero_a: bool = False,
    shift_rank: int = 10,
    lr: float = 5e-3,
) -> Job:
    layers, ((x, y), val) = _teacher((32, 48, 48, 8), shift_rank)
    adapted: list[nn.Module] = [kind(layer, rank, scaling, zero_a=zero_a) for layer in layers]
    model = nn.Sequential(adapted[0], nn.Tanh(), adapted[1], nn.Tanh(), adapted[2])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    return Job(model, optimizer, functional.mse_loss, endless(x, y, 64, seed), 300, val=val, val_every=50)


@program("lora_both_zero", "lora_zero_init", also_ok=STUCK, where="lora_A", source="Hu 2021")
def _(seed: int, fixed: bool) -> Job:
    return _job(seed, Adapted, rank=8, zero_a=not fixed)


@program(
    "lora_layers_both_zero", "lora_zero_init", also_ok=STUCK, where="lora_A", source="Hu 2021, as PEFT lays it out"
)
def _(seed: int, fixed: bool) -> Job:
    return _job(seed, AdaptedByLayers, rank=12, zero_a=not fixed)


@program("lora_rank_one", "lora_rank_too_low", also_ok=("underfitting",), where="lora", source="Biderman 2024")
def _(seed: int, fixed: bool) -> Job:
    return _job(seed, Adapted, rank=16 if fixed else 1)


@program("lora_layers_rank_two", "lora_rank_too_low", also_ok=("underfitting",), where="lora", source="Biderman 2024")
def _(seed: int, fixed: bool) -> Job:
    return _job(seed, AdaptedByLayers, rank=20 if fixed else 2, shift_rank=16)


@program("lora_loud", "lora_scale_too_large", also_ok=LOUD, where="0", source="alpha / r far above 2")
def _(seed: int, fixed: bool) -> Job:
    return _job(seed, Adapted, rank=8, scaling=2.0 if fixed else 64.0)


@program("lora_layers_loud", "lora_scale_too_large", also_ok=LOUD, where="0", source="alpha / r far above 2")
def _(seed: int, fixed: bool) -> Job:
    return _job(seed, AdaptedByLayers, rank=12, scaling=1.0 if fixed else 100.0, lr=3e-3)


@program("h_lora_rank_one_is_enough", source="control: the change has rank one")
def _(seed: int, fixed: bool) -> Job:
    return _job(seed, Adapted, rank=1, shift_rank=1, lr=1e-2)


@program("h_lora_rank_eight", source="control: a little less than the change needs, and good enough")
def _(seed: int, fixed: bool) -> Job:
    return _job(seed, AdaptedByLayers, rank=8, scaling=2.0)
