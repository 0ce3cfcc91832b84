"""A training script with a mirror, as a user writes it: mirror_script.py NAME [finish | no-finish | fail | resume]."""

import sys

import torch

import sonde
from sonde.session.observers.mirror import Mirror

STEPS = 12


def main(name: str, ending: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sonde.init(
        project="mirrored", name="m", config={"lr": 0.01, "net": {"width": 4}}, resume=ending == "resume"
    )
    session.watch(model, optimizer, mirror=Mirror(to=name, stats=["grad/*/norm", "update/*/ratio"], every=5))
    for step in range(STEPS):
        loss = model(torch.ones(2, 4)).square().mean() * (float("nan") if step == STEPS - 3 else 1)
        loss.backward()
        session.log({"loss": loss.item(), "large": 1e300 if step == 3 else float("-inf") if step == 4 else 0.1 + step})
        optimizer.step()
        optimizer.zero_grad()
    if ending == "fail":
        raise ValueError("the training has failed")
    if ending != "no-finish":
        session.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
