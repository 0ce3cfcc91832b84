"""Trains with a snapshot at every step and returns to an earlier step now and then, until it is killed.

Argument: the folder of the runs. Every weight is 1,000 times the number of the attempt plus the step. Prints attempt
and step of each acknowledged snapshot.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import sonde


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(200_000))

    def forward(self) -> Tensor:
        return self.weight.sum()


torch.set_num_threads(1)
model = Known()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
session: Any = sonde.init(project="kill", name="kill", dir=sys.argv[1], verbose=False, resume=True)
attempt = len(sonde.open(session.path)._now.catalog.attempts)
session.watch(model, optimizer, snapshots=sonde.Snapshots(when=sonde.every(1), kinds=("param",)))
done = session.steps.snapshots.ledger.done


def tell(outcome: Any) -> None:
    done(outcome)
    if outcome.state == "taken" and not outcome.why:
        print(outcome.pending.attempt.wait(0), outcome.pending.step, flush=True)


session.steps.snapshots.ledger.done = tell
print("ready", flush=True)
while True:
    for _ in range(7):
        with torch.no_grad():
            model.weight.fill_(1000 * attempt + session.next_step)
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert session.rewind(max(session.next_step - 4, 0))
    attempt += 1
