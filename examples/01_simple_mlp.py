"""Tutorial 1: a small network whose gradients vanish on the way back, diagnosed from one batch and fixed.

Pressure is the size of the gradient that reaches a layer. It should be about as large at the first layer as at the
last. Here every activation is a sigmoid with far too large inputs: it is flat there, and lets little gradient through.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sonde.flow import FlowAnalyzer, FlowReport


def make_mlp(activation: type[nn.Module], std: float | None) -> nn.Sequential:
    """Four layers. `std` is the standard deviation of the weights; None uses He initialisation for ReLU."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for given, out in ((20, 64), (64, 64), (64, 64)):
        linear = nn.Linear(given, out)
        if std is None:
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        else:
            nn.init.normal_(linear.weight, std=std)
        layers += [linear, activation()]
    return nn.Sequential(*layers, nn.Linear(64, 2))


def make_batch(size: int = 256) -> tuple[Tensor, Tensor]:
    """Two classes: whether the first two features have the same sign."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 20, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def final_loss(model: nn.Module, steps: int = 200) -> float:
    """The loss after a short training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = make_batch()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def show(title: str, model: nn.Module) -> FlowReport:
    print(f"\n=== {title}")
    x, y = make_batch()
    report = FlowAnalyzer(model).analyze(x, y, nn.CrossEntropyLoss())  # leaves the model unchanged
    report.print_summary()
    print()
    report.print_layers()
    return report


def main() -> None:
    broken, fixed = make_mlp(nn.Sigmoid, std=4.0), make_mlp(nn.ReLU, std=None)
    before = show("Before: sigmoids after weights with a standard deviation of 4", broken)
    before.save_html("before.html")
    after = show("After: ReLU and He initialisation", fixed)
    after.save_html("after.html")
    after.save_json("after.json")

    print("\n=== Before and after")
    print(f"health                   {before.health:6.0f} {after.health:8.0f}")
    print(f"issues                   {len(before.issues):6} {len(after.issues):8}")
    print(f"first layer's pressure   {before.layer('0').metrics.relative_pressure:6.2g}", end=" ")
    print(f"{after.layer('0').metrics.relative_pressure:8.2g}   of the pressure near the output")
    print(f"loss after 200 steps     {final_loss(broken):6.3f} {final_loss(fixed):8.3f}")
    print("\nThe reports are in before.html, after.html and after.json.")


if __name__ == "__main__":
    main()
