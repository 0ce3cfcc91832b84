"""Trains a small model in one of several layouts, without sonde, and with it next to the truth.

torchrun --nproc-per-node N child_sharded.py LAYOUT DTYPE
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import sonde

STEPS = 20
LIMIT = 0.05
WORLD = int(os.environ["WORLD_SIZE"])
SAMPLES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """`head` has 3 rows and `scale` one element: their shards are uneven, or empty on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x))) * self.scale


def fsdp(model: Model, **options: Any) -> None:
    for part in (model.first, model.second, model):
        fully_shard(part, **options)


def tensor_parallel(model: Model, mesh: Any) -> None:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for part in (model.first, model.second):
        parallelize_module(part, mesh, plan)
    parallelize_module(model.head, mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))


def fsdp_and_tensor_parallel(model: Model) -> None:
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    fsdp(model, mesh=mesh["data"])


LAYOUTS: dict[str, Callable[[Model], None]] = {
    "none": lambda model: None,
    "fsdp": fsdp,
    "mixed": lambda model: fsdp(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "hsdp": lambda model: fsdp(model, mesh=init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("copy", "shard"))),
    "tensor": lambda model: tensor_parallel(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tensor",))),
    "both": fsdp_and_tensor_parallel,
}


def whole(tensor: Any) -> np.ndarray[Any, Any]:
    found = tensor.detach()
    return np.array((found.full_tensor() if isinstance(found, DTensor) else found).numpy())


class Truth:
    """Whole tensors of every step, gathered by torch."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.step = model, 0
        self.found: dict[str, np.ndarray[Any, Any]] = {}
        self.before: dict[str, np.ndarray[Any, Any]] = {}
        self.num_collectives = 0
        optimizer.register_step_pre_hook(lambda *_: self.count(self.begin))
        optimizer.register_step_post_hook(lambda one, *_: self.count(lambda: self.end(one)))

    def count(self, gather: Callable[[], None]) -> None:
        before = num_collectives()
        gather()
        self.num_collectives += num_collectives() - before

    def begin(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.before[name] = whole(parameter)
            self.found[f"param/{name}/{self.step}"] = self.before[name]
            self.found[f"grad/{name}/{self.step}"] = whole(parameter.grad)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in self.model.named_parameters():
            self.found[f"update/{name}/{self.step}"] = whole(parameter) - self.before[name]
            for state in ("exp_avg", "exp_avg_sq"):
                self.found[f"optim/{name}.{state}/{self.step}"] = whole(optimizer.state[parameter][state])
        self.step += 1


def num_collectives() -> int:
    """Of this process, in all groups."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group() for group in groups)


def batches(layout: str, dtype: torch.dtype) -> list[Tensor]:
    """Every rank of a data-parallel group has its own samples; those of a tensor-parallel group share theirs."""
    generator = torch.Generator().manual_seed(7)
    every = [torch.randn(SAMPLES, 4, 8, dtype=dtype, generator=generator) for _ in range(STEPS)]
    if layout in ("none", "tensor"):
        rank, ranks = 0, 1
    else:
        rank, ranks = (dist.get_rank() // (WORLD // 2), 2) if layout == "both" else (dist.get_rank(), WORLD)
    samples = [x.chunk(ranks)[rank] for x in every]
    if layout in ("tensor", "both"):  # the sequence is sharded
        tensor_rank, tensor_ranks = (dist.get_rank() % (WORLD // 2), WORLD // 2) if layout == "both" else (
            dist.get_rank(), WORLD,
        )  # fmt: skip
        samples = [x.chunk(tensor_ranks, 1)[tensor_rank] for x in samples]
    return samples


def train(layout: str, dtype: torch.dtype, *, recorded: bool, compared: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    LAYOUTS[layout](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = num_collectives()
    session = sonde.watch(model, optimizer, name=layout, budget=None) if recorded else None
    truth = Truth(model, optimizer) if compared else None
    norms = []
    for x in batches(layout, dtype):
        optimizer.zero_grad()
        for part in x.chunk(2):  # gradient accumulation
            (model(part).square().mean() / 2).backward()
        if sys.argv[1] in ("fsdp", "hsdp", "mixed"):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        optimizer.step()
    count = num_collectives() - before - (0 if truth is None else truth.num_collectives)
    if session is not None:
        session.finish()
    weights = b"".join(
        getattr(p, "_local_tensor", p).detach().contiguous().view(torch.uint8).numpy().tobytes()
        for p in model.parameters()
    )
    return {
        "collectives": count,
        "weights": hashlib.sha256(weights).hexdigest(),
        "norms": [float(whole(norm)) for norm in norms],
        "tensors": {} if truth is None else truth.found,
    }


def main() -> None:
    layout, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bare = train(layout, dtype, recorded=False, compared=False)
    watched = train(layout, dtype, recorded=True, compared=True)
    assert bare["collectives"] > 0
    assert bare["collectives"] == watched["collectives"], (bare["collectives"], watched["collectives"])
    assert bare["weights"] == watched["weights"]
    if dist.get_rank() == 0:
        np.savez("truth.npz", norms=watched["norms"], **watched["tensors"])
        np.savez("single.npz", **train("none", dtype, recorded=False, compared=True)["tensors"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
