"""Saves checkpoints over and over, each time dying at the next system call that saving makes.

Arguments: folder, first point, stride. Point n's checkpoints are in `<folder>/<n>`; what was acknowledged is in
`<folder>/<n>.ack`.
Ends with the first run that came to its end, and prints that point.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from sonde.tune import CheckpointManager

folder, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
real_write = os.write


def crash_at(point: int) -> None:
    """Before the n-th call that touches the disk the process is gone; a write has done half of its work."""
    calls = itertools.count()

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == point:
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                if name == "save_file":
                    real(*arguments, **keywords)
                    os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
                os._exit(9)
            return real(*arguments, **keywords)

        setattr(owner, name, call)

    for name in ("write", "fsync", "replace", "rename", "unlink", "open", "mkdir", "rmdir"):
        wrap(os, name)
    wrap(safetensors.torch, "save_file")


def make(where: Path) -> tuple[nn.Module, CheckpointManager]:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return net, CheckpointManager(where, model=net, optimizer=optimizer, interval=1, keep_last=2)


def save(point: int) -> None:
    acks = os.open(folder / f"{point}.ack", os.O_CREAT | os.O_WRONLY)
    net, manager = make(folder / str(point))
    crash_at(point)
    for step in (1, 2, 3, 3, 4):  # one of them again
        net.weight.data.fill_(step)
        manager.save(step)
        real_write(acks, f"{step}\n".encode())
    os._exit(0)


torch.set_num_threads(1)
# What torch imports when an optimizer is first made takes a second: once here, not in every child.
make(folder / "warm")[1].save(1)
for point in itertools.count(first, stride):
    child = os.fork()
    if child == 0:
        save(point)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        print(point)
        break
