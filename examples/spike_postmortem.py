"""A post-mortem of loss spikes: which steps, what was different about them, and what came first.

Every 70 steps a schedule restarts with a learning rate that is far too high.
You should see: the spikes as a finding, and a table in which the learning rate jumps before the loss. Takes seconds.
"""

import torch
from torch import nn

import sonde

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
centres = torch.randn(5, 20)

with sonde.watch(model, optimizer, project="examples", name="spikes", budget=None):
    for step in range(280):
        optimizer.param_groups[0]["lr"] = 3.0 if step > 50 and step % 70 < 3 else 0.02
        y = torch.randint(5, (64,))
        loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(64, 20)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sonde.log({"loss": loss})

run = sonde.open("latest")
print(run.findings())
losses, rates = (
    dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))
    for table in (run.scalars("loss"), run.scalars("optim/lr"))
)
worst = max(losses, key=lambda step: losses[step])
print(f"\nThe highest loss is at step {worst}. Around it:\n step  learning rate   loss")
for step in range(max(worst - 5, 0), worst + 3):
    print(f"{step:>5}  {rates.get(step, float('nan')):>13g}   {losses[step]:.3g}")
