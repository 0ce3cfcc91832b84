"""Healthy models whose initialisation lets little gradient through some of their layers, and small recurrent ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import synthetic
from specimen import Specimen
from specimens_timm import VIT, _timm
from specimens_torchvision import COUNT, _vision
from tasks import Batch, Batches

GROUP = "initialisation"


class LoRA(nn.Module):
    """A frozen linear layer and an adapter whose second matrix starts at zero."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(width, width),
            nn.Linear(width, rank, False),
            nn.Linear(rank, width, False),
        )
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Experts(nn.Module):
    """A mixture of experts with a gate."""

    def __init__(self, width: int = 32, num: int = 4) -> None:
        super().__init__()
        self.enter, self.norm, self.gate = nn.Linear(12, width), nn.LayerNorm(width), nn.Linear(width, num)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(num)
        )
        self.head = nn.Linear(width, COUNT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        h = self.norm(x)
        mixed = torch.stack([expert(h) for expert in self.experts], -1) * self.gate(h).softmax(-1)[:, None]
        return self.head(x + mixed.sum(-1))


class Sequence(nn.Module):
    """A recurrent layer as torch initialises it, and a prediction at its end."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _pairs(make: Any, **sizes: int) -> Batches:
    return ({"x": x, "y": y} for x, y in make(**sizes))


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def _last_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"][:, -1])


def _own(name: str, build: Any, batches: Any, loss: Any) -> Specimen:
    return Specimen(name, GROUP, build, batches, loss)


def _zero_gamma(models: Any) -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=COUNT, zero_init_residual=True)


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(16, 32, 2), block(32, None, 2)], layer_scale=1e-6, num_classes=COUNT)


def _adapted() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), LoRA(32), nn.ReLU(), LoRA(32), nn.ReLU(), nn.Linear(32, COUNT))


ALL = [
    _vision("ResNet, last gammas zero", _zero_gamma, size=64),
    _vision("ConvNeXt, layer scale 1e-6", _convnext),
    _timm(
        "ConvNeXt of timm, layer scale 1e-6", "convnext.ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 16, 32, 32),
        ls_init_value=1e-6,
    ),
    _timm("CaiT, layer scale 1e-5", "cait.Cait", **VIT, init_values=1e-5),
    _timm("BEiT, layer scale 1e-5", "beit.Beit", **VIT, init_values=1e-5, use_abs_pos_emb=False, use_rel_pos_bias=True),
    _timm("XCiT, eta 1e-5", "xcit.Xcit", **VIT, eta=1e-5),
    _own("LoRA", _adapted, partial(_pairs, synthetic.clusters), _class_loss),
    _own("Mixture of experts", Experts, partial(_pairs, synthetic.clusters), _class_loss),
    *(
        _own(f"{kind.__name__}, {length} steps", partial(lambda k: Sequence(k(1, 32, batch_first=True)), kind),
             partial(_pairs, synthetic.signals, length=length), _last_loss)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for length in (12, 48)
    ),
]  # fmt: skip
