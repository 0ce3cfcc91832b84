"""Output logits that drift away from what the loss needs, and some that grow as far as the data allow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.data import clusters, language
from faults.gpt import GPT
from faults.program import Job, endless, program
from faults.recurrent import per_token

AdamW = torch.optim.AdamW
WILD = (
    "loss_spikes", "loss_oscillation", "exploding_gradients", "underfitting", "lr_too_high",
    "flipped_gradient", "nan_inf",
)  # fmt: skip


@program(
    "head_drifts",
    ("uneven_learning_rates", "output_logit_growth", "lr_too_high"),
    also_ok=WILD,
    source="Wortsman 2023: output logits diverge",
)
def _(seed: int, fixed: bool) -> Job:
    model = GPT(layers=1)
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": model.head.parameters(), "lr": 2e-3 if fixed else 1.0}]
    optimizer = AdamW(groups, 2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    return Job(model, optimizer, per_token, language(seed), 160, clip=1.0)


@program("z_loss_with_wrong_sign", "output_logit_growth", also_ok=WILD, source="PaLM's z-loss, subtracted")
def _(seed: int, fixed: bool) -> Job:
    weight = 1e-3 if fixed else -2e-2

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return per_token(output, target) + weight * output.logsumexp(-1).square().mean()

    model = GPT(layers=1)
    return Job(model, AdamW(model.parameters(), 4e-3, betas=(0.9, 0.95)), loss, language(seed), 240, clip=1.0)


class Cosine(nn.Module):
    """A classifier by angle with a learnt temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32))
        self.classes = nn.Parameter(torch.randn(5, 32) / math.sqrt(32))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, x: Tensor) -> Any:
        angles = functional.normalize(self.body(x), dim=-1) @ functional.normalize(self.classes, dim=-1).t()
        return self.log_scale.exp() * angles


def _classifier(model: nn.Module, seed: int, spread: float, lr: float, steps: int) -> Job:
    (x, y), val = clusters(spread=spread)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    batches = endless(x, y, 64, seed)
    return Job(model, optimizer, functional.cross_entropy, batches, steps, val=val, val_every=50, is_accuracy=True)


@program("h_learnt_temperature", source="control: a temperature that finds its level")
def _(seed: int, fixed: bool) -> Job:
    return _classifier(Cosine(), seed, 1.5, 1e-2, 300)


@program("h_separable", source="control: logits grow as far as the data allow")
def _(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    return _classifier(model, seed, 0.3, 5e-3, 400)
