"""Tensor parallelism with a sharded sequence: each rank has a part of each layer, and a part of the tokens.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import sonde


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")  # "nccl" on GPUs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    model = nn.Sequential(Block(16), Block(16), nn.Linear(16, 4))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in (model[0], model[1]):
        parallelize_module(block, mesh, plan)
    parallelize_module(model[2], mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with sonde.watch(model, optimizer, project="examples", name="tensor-parallel"):  # on every rank
        torch.manual_seed(1)  # the same samples on every rank
        for _ in range(steps):
            x = torch.randn(8, 6, 16)
            tokens = x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
            loss = nn.functional.mse_loss(model(tokens), x[..., :4])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sonde.log({"loss": loss})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
