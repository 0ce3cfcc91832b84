"""Two processes train one model; the first takes snapshots and compares them with clones. Arguments: folder, port."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import sonde


def work(rank: int, folder: str, port: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 20))
    model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    session: Any = sonde.init(project="ddp", dir=folder, verbose=False)
    plan = sonde.Snapshots(when=sonde.every(2), kinds="all", probe=torch.ones(3, 20), store="memory")
    session.watch(model, optimizer, snapshots=plan)
    torch.manual_seed(rank)
    seen = []
    for step in range(6):
        model(torch.randn(8, 20)).square().mean().backward()
        named = [(f"param/{n}", t) for n, t in net.state_dict().items()]
        named += [(f"grad/{n}", p.grad) for n, p in net.named_parameters() if p.grad is not None]
        seen.append({name: tensor.clone() for name, tensor in named})
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # the next backward pass writes into what is held
    if rank == 0:
        assert session.flush(30)
        store = session.steps.snapshots._writer._store
        assert store.steps() == [0, 2, 4]
        for step in store.steps():
            tensors = store.read(step).tensors
            assert {"probe/model", "act/model", "batch/input.0"} <= set(tensors)
            for name, tensor in seen[step].items():
                assert np.array_equal(tensors[name].values(), tensor.numpy()), (step, name)
        assert session.recording.breaker.num_errors == 0
        print("all as it was")
    session.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1], sys.argv[2]), nprocs=2)  # type: ignore[no-untyped-call]
