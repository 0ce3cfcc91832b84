"""DistributedDataParallel: every rank has the whole model, the first one records.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import sonde


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with sonde.watch(model, optimizer, project="examples", name="ddp"):  # on every rank
        torch.manual_seed(dist.get_rank())  # its own samples
        for _ in range(steps):
            x = torch.randn(32, 16)
            loss = nn.functional.mse_loss(model(x), x[:, :4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sonde.log({"loss": loss})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
