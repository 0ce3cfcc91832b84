"""A sweep: several learning rates, one run each, compared by their loss and by what sonde found.

You should see: one line per run; the smallest rate is too low, the largest breaks the training. Takes seconds.
"""

import torch
from torch import nn

import sonde


def train(lr: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with sonde.watch(model, optimizer, project="sweep", name=f"lr-{lr:g}", config={"lr": lr}, verbose=False):
        for _ in range(100):
            x = torch.randn(64, 10)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sonde.log({"loss": loss})


for lr in (1e-6, 1e-2, 10.0):
    train(lr)

for run in reversed(sonde.runs(project="sweep")):
    last = run.scalars("loss")["value"][-1].as_py()
    problems = [finding.rule for finding in run.findings() if finding.severity != "info"]
    print(f"{run.name:<8} final loss {last:<8.3g} {', '.join(problems) or 'no problems found'}")
