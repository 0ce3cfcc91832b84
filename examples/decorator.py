"""`@sonde.record`: watch a training function while it runs, and leave nothing behind when it returns."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import sonde


@sonde.record(project="examples", name="decorator")
def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    """An ordinary training loop; sonde finds the model and the optimizer among the arguments."""
    loss = torch.tensor(float("nan"))
    for _ in range(num_steps):
        x = torch.randn(64, 8)
        loss = (model(x) - x.norm(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sonde.log({"loss": loss})
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    print(f"final loss {train(model, torch.optim.SGD(model.parameters(), lr=0.05), options.steps):.3f}")
    for row in sonde.open("latest").stats("update/*/ratio", steps=range(1)).to_pylist():
        print(f"  update/weight ratio of {row['site']}: {row['value']:.2e}")


if __name__ == "__main__":
    main()
