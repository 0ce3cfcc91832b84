"""A small training script for the browser tests: healthy, corrupted at a given step, or endless."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import sonde


class Net(nn.Module):
    """A few nested blocks for the module tree, with attention for the flow view."""

    def __init__(self, dim: int, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 2 * dim, dropout=0.0, batch_first=True) for _ in range(num_blocks)
        )
        self.head = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random sequences, labelled by the group of features with the largest mean; learnable in a hundred steps."""
    x = torch.randn(32, 6, 8, generator=generator)
    y = torch.stack([x[..., :3].mean((1, 2)), x[..., 3:5].mean((1, 2)), x[..., 5:].mean((1, 2))], 1).argmax(1)
    return x, y


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--name", default="run")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--spoil-at", type=int, default=-1)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = Net(dim=32, num_blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    config = {"lr": options.lr, "dim": 32, "optimizer": {"name": "adamw", "betas": [0.9, 0.999]}}
    session = sonde.init(project="thirds", name=options.name, dir=options.dir, config=config, tags=["browser"])
    session.watch(model, optimizer)
    for step in range(options.steps):
        x, y = batch(generator)
        if step == options.spoil_at:
            with torch.no_grad():
                model.embed.weight.mul_(1e25)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        session.log({"loss": loss, "lr": optimizer.param_groups[0]["lr"]})
        if step % 20 == 19:
            with torch.no_grad():
                held_out, target = batch(generator)
                answer = model(held_out)
            session.log(
                {
                    "val/loss": nn.functional.cross_entropy(answer, target),
                    "val/accuracy": (answer.argmax(1) == target).float().mean(),
                }
            )
        time.sleep(options.pause_s)
    session.finish()


if __name__ == "__main__":
    main()
