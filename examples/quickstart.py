"""The shortest example: two lines around a training loop, one to read it back."""

import torch

import sonde

model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with sonde.watch(model, optimizer):
    for _ in range(100):
        x = torch.randn(64, 10)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sonde.log({"loss": loss})

run = sonde.open("latest")
print(run.stats("grad/*/norm", steps=range(99, 100)).to_pylist())
