"""Hunt a NaN: which module made the first one, at which step, and from which batch.

The first module divides each row by its norm, and one row of the data is all zeros. A step later every weight is NaN,
and printing the loss says nothing about where it began.
You should see: the step and the module, and then the row of that batch. Takes seconds.
"""

import torch
from torch import Tensor, nn

import sonde


class UnitNorm(nn.Module):
    """Each row divided by its norm, without an epsilon."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=1, keepdim=True)


torch.manual_seed(0)
data = torch.randn(2048, 8)
data[1500] = 0.0
model = nn.Sequential(UnitNorm(), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
batches = data.split(32)

with sonde.watch(model, optimizer, project="examples", name="nan-hunt", budget=None):
    for x in batches:
        sonde.batch(x)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sonde.log({"loss": loss})

run = sonde.open("latest")
finding = run.findings()[0]
print(finding)
x = batches[finding.step]
print(f"Rows of the batch of step {finding.step} that are all zeros: {(x == 0).all(1).nonzero().flatten().tolist()}")
