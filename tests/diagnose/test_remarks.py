"""Rules that mostly report info, each on a small real training run and on a similar healthy one.

`data_starvation` and `throughput_regression` need minutes of clock time: they are tested on hand-made windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde

pytestmark = pytest.mark.slow


def rules_of(
    model: nn.Module,
    *,
    target: Callable[[Tensor], Tensor] = lambda x: x[:, :1].sin(),
    batch: int = 32,
    steps: int = 120,
    optimizer: Callable[..., Any] = torch.optim.Adam,
    **hyper: float,
) -> set[str]:
    """Every rule that says anything of a small regression."""
    torch.set_num_threads(1)
    made = optimizer(model.parameters(), **{"lr": 3e-3, **hyper})
    generator = torch.Generator().manual_seed(0)
    session = sonde.init(project="remarks", verbose=False).watch(model, made)
    loss_fn = nn.MSELoss()
    for _ in range(steps):
        x = torch.randn(batch, 8, generator=generator)
        sonde.batch(x, target(x))
        made.zero_grad()
        loss = loss_fn(model(x), target(x))
        loss.backward()
        made.step()
        sonde.log({"loss": loss})
    sonde.finish()
    return {finding.rule for finding in sonde.open(session.path).findings()}


def mlp(*between: nn.Module, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), *between, nn.Tanh(), nn.Linear(width, 1))


class Deaf(nn.Module):
    """Depends on its input by a given fraction."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.inner, self.share = mlp(), share

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.share * x + 1.0)
        return y


def test_constant_output() -> None:
    assert "constant_output" in rules_of(Deaf(1e-7))
    assert "constant_output" not in rules_of(Deaf(1.0))


def test_loss_plateau() -> None:
    noise = torch.Generator().manual_seed(1)
    assert "loss_plateau" in rules_of(mlp(), target=lambda x: torch.randn(len(x), 1, generator=noise))
    assert "loss_plateau" not in rules_of(mlp())


def test_loss_divergence() -> None:
    assert "loss_divergence" in rules_of(mlp(), optimizer=torch.optim.SGD, lr=3e-3, maximize=True)
    assert "loss_divergence" not in rules_of(mlp(), optimizer=torch.optim.SGD, lr=3e-2)


def test_decay_on_norms() -> None:
    assert "decay_on_norms" in rules_of(mlp(nn.LayerNorm(32)), optimizer=torch.optim.AdamW, weight_decay=0.1)
    assert "decay_on_norms" not in rules_of(mlp(nn.LayerNorm(32)), optimizer=torch.optim.AdamW, weight_decay=0.0)


def test_tiny_batch_norm() -> None:
    assert "tiny_batch_norm" in rules_of(mlp(nn.BatchNorm1d(32)), batch=2)
    assert "tiny_batch_norm" not in rules_of(mlp(nn.BatchNorm1d(32)), batch=32)
    assert "tiny_batch_norm" not in rules_of(mlp(nn.LayerNorm(32)), batch=2)


def test_gradient_noise() -> None:
    noise = torch.Generator().manual_seed(1)

    def noisy(x: Tensor) -> Tensor:
        return x[:, :1].sin() + 20.0 * torch.randn(len(x), 1, generator=noise)

    assert "gradient_noise" in rules_of(mlp(), target=noisy, batch=8, lr=1e-5, steps=200)
    assert "gradient_noise" not in rules_of(mlp(), batch=16, lr=1e-4, target=lambda x: x[:, :1] ** 2 - x[:, 1:2])


def test_rank_collapse() -> None:
    collapsing = nn.Sequential(nn.Linear(8, 32), *[m for _ in range(8) for m in (nn.Linear(32, 32), nn.Sigmoid())])
    torch.manual_seed(0)
    for layer in collapsing:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0.0, 0.05)
    assert "rank_collapse" in rules_of(nn.Sequential(collapsing, nn.Linear(32, 1)), lr=1e-4)
    assert "rank_collapse" not in rules_of(mlp(), lr=1e-3)
