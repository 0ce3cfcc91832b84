"""Pipeline parallelism: each rank trains some of the layers; one run shows them all.

torchrun --nproc-per-node 2 examples/pipeline.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import sonde

WIDTH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    blocks = nn.ModuleDict({f"block{i}": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for i in range(world_size)})
    part = nn.Sequential()
    part.add_module(f"block{rank}", blocks[f"block{rank}"])  # the layers of this rank, under their own names
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    with sonde.watch(part, optimizer, project="examples", name="pipeline"):  # on every rank
        for _ in range(steps):
            x, losses = torch.randn(32, WIDTH), []
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x.flip(1), losses=losses)
            optimizer.step()
            if losses:
                sonde.log({"loss": torch.stack(losses).mean()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
