"""Trains with a snapshot at every step until killed, and tells on stdout which are acknowledged. Argument: folder.

Every parameter is -0.5 times the number of the step, so that whoever reads a snapshot knows what must be in it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import sonde


class Falling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(400_000))
        self.small = nn.ParameterList(nn.Parameter(torch.zeros(7)) for _ in range(40))

    def forward(self) -> Tensor:
        return self.large.sum() + torch.stack([p.sum() for p in self.small]).sum()


torch.set_num_threads(1)
model = Falling()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
session: Any = sonde.init(project="kill", name="kill", dir=sys.argv[1], verbose=False, resume=True)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(-0.5 * session.step_number)
session.watch(model, optimizer, snapshots=sonde.Snapshots(when=sonde.every(1), kinds=("param", "grad")))
done = session.steps.snapshots.ledger.done


def tell(outcome: Any) -> None:
    done(outcome)
    if outcome.state in ("taken", "exists") and not outcome.why.startswith("it is in the store"):
        print(outcome.pending.step, flush=True)


session.steps.snapshots.ledger.done = tell
print("ready", flush=True)
while True:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
