"""A loop with everything that makes gradients hard to interpret: accumulation, autocast, a GradScaler and clipping.

One step is one optimizer step. Gradients are recorded as the optimizer used them: accumulated over the micro-batches,
unscaled, with their norms before and after clipping.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import sonde


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--max-norm", type=float, default=0.5)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)

    with sonde.watch(model, optimizer, project="examples", name="custom-loop", config=vars(options)) as session:
        for _ in range(options.steps):
            optimizer.zero_grad()
            for _ in range(options.micro_batches):
                x = torch.randn(32, 20, device=device)
                with torch.autocast(device, dtype=torch.bfloat16):
                    loss = (model(x) - x[:, :1] * x[:, 1:2]).square().mean() / options.micro_batches
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
            scaler.step(optimizer)
            scaler.update()
            session.log({"loss": loss * options.micro_batches, "scale": scaler.get_scale()})

    run = sonde.open(session.path)
    print("Gradients of step 0, before and after clipping:")
    for row in run.stats(["grad/*/norm_preclip", "grad/*/norm", "grad/*/clip_factor"], steps=range(1)).to_pylist():
        print(f"  {row['site']:<10} {row['stat']:<12} {row['value']:.4f}")


if __name__ == "__main__":
    main()
