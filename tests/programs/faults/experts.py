"""Mixtures of experts: a router that sends everything to one of them, and routers that do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.data import clusters, regression
from faults.program import Job, endless, program


class Mixture(nn.Module):
    """The best `chosen` experts of each row, weighed by the router. An expert that no row chose is not called."""

    def __init__(self, width: int, experts: int, chosen: int, *, dense: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.chosen, self.dense = chosen, dense

    def forward(self, x: Tensor) -> Any:
        logits = self.router(x)
        best, index = logits.topk(self.chosen, -1)
        weights = torch.zeros_like(logits).scatter(-1, index, best.softmax(-1))
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = weights[:, number] > 0
            if self.dense:
                y = y + weights[:, number, None] * expert(x)
            elif rows.any():
                y = y.index_add(0, rows.nonzero().squeeze(1), weights[rows, number, None] * expert(x[rows]))
        return x + y


def _classifier(seed: int, mixture: Mixture, lr: float, steps: int = 200) -> Job:
    (x, y), val = clusters(spread=1.3)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), mixture, nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr)
    batches = endless(x, y, 64, seed)
    return Job(model, optimizer, functional.cross_entropy, batches, steps, val=val, val_every=50, is_accuracy=True)


@program(
    "router_stuck_on_one", "moe_routing_collapse", where="2.experts", source="Shazeer 2017: no balance, biased start"
)
def _(seed: int, fixed: bool) -> Job:
    mixture = Mixture(32, 6, 1)
    if not fixed:
        mixture.router.bias.data[2] = 12.0
    return _classifier(seed, mixture, 2e-3)


@program("router_stuck_dense", "moe_routing_collapse", where="1.experts", source="the same with all experts computed")
def _(seed: int, fixed: bool) -> Job:
    (x, y), val = regression()
    mixture = Mixture(24, 8, 2, dense=True)
    if not fixed:
        nn.init.zeros_(mixture.router.weight)
        mixture.router.bias.data = 5.0 * torch.arange(8.0)
    model = nn.Sequential(nn.Linear(8, 24), mixture, nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    return Job(model, optimizer, functional.mse_loss, endless(x, y, 64, seed), 250, val=val, val_every=50)


@program("h_balanced_experts", source="control: every expert is chosen by someone")
def _(seed: int, fixed: bool) -> Job:
    mixture = Mixture(32, 4, 2)
    nn.init.normal_(mixture.router.weight, 0, 0.02)
    return _classifier(seed, mixture, 2e-3)
