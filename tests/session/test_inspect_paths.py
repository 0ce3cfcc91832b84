"""What a block hands on of its input is measured; the structure document says which linear layers feed each other."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import sonde


class Block(nn.Module):
    def __init__(self, skip: float) -> None:
        super().__init__()
        self.norm, self.f, self.skip = nn.LayerNorm(16), nn.Linear(16, 16), skip

    def forward(self, x: Tensor) -> Tensor:
        return self.skip * x + 0.1 * torch.tanh(self.f(self.norm(x)))


def test_carry_is_the_strength_of_the_skip_connection_and_linear_layers_in_a_row_are_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Block(1.0), Block(0.5), nn.Linear(16, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with sonde.init(project="p", name="r", dir=str(tmp_path), verbose=False) as session:
        session.watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()
            sonde.log({"loss": 1.0})
        path = session.path
    assert path is not None
    run = sonde.open(path)
    carries = {site: values[0] for site, _, values in run.window().by_site("unit/*/skip_gain")}
    assert set(carries) == {"1", "2"}
    assert abs(carries["1"] - 1.0) < 0.15
    assert abs(carries["2"] - 0.5) < 0.15
    assert {m["name"]: m.get("fed_by") for m in run.structure()["modules"] if m.get("fed_by")} == {"4": "3"}
