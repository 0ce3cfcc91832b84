"""Trains until it is killed, and prints loss and gradient norm of each step that it makes.

Arguments: the folder of the runs; and a step, if the run is to be resumed and to return to that step first.
"""

from __future__ import annotations

import sys

import torch

import sonde

torch.manual_seed(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
torch.set_num_threads(1)
writer = {"seal_steps": 16, "flush_interval_s": 0.01, "heartbeat_s": 0.05}
session = sonde.init(
    "p", "n", sys.argv[1], resume=len(sys.argv) > 2, verbose=False, system_metrics=False, writer=writer
)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
if len(sys.argv) > 2:
    assert session.rewind(int(sys.argv[2]))
session.watch(model, optimizer, inspect=False, activations=False, params=False, optim=False)
print("ready", flush=True)
while True:
    loss = model(torch.randn(8, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = float(model[0].weight.grad.double().square().sum().sqrt())
    step = session.next_step
    optimizer.step()
    session.log({"loss": loss.item()})
    print(f"{step} {loss.item()!r} {norm!r}", flush=True)
