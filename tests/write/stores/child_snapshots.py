"""Writes snapshots, and dies. Arguments: folder for the runs, first point, stride.

For point n the process is gone before the n-th system call that changes the disk; a write may have done half of its
work. Its run is `<folder>/<n>`, the steps it acknowledged are the lines of `<folder>/<n>.ack`. Ends with the first run
that came to its end, and prints that point. With a stride of 0 it writes for ever, to be killed from outside.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

from sonde.schema.snapshots.tensors import Snapshot
from sonde.testing.stores import drifting
from sonde.write.tensors.store import open_store

folder, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
real_write = os.write


def crash_at(point: int) -> None:
    calls = itertools.count()

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == point:
                if name == "writev":
                    real_write(arguments[0], bytes(arguments[1][0])[: len(arguments[1][0]) // 2])
                if name == "write":
                    real_write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os._exit(9)
            return real(*arguments, **keywords)

        setattr(os, name, call)

    for name in ("write", "writev", "fsync", "rename", "replace", "mkdir", "open", "rmdir", "unlink"):
        wrap(name)


def work(point: int, last: float) -> None:
    run = folder / str(point)
    acks = os.open(folder / f"{point}.ack", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    if stride:
        crash_at(point)
    store = open_store("zarr", run)
    step = 0
    while step < last:
        receipt = store.write(Snapshot(step, float(step), "every", drifting(step % 7, size=300)))
        real_write(acks, f"{receipt.step}\n".encode())
        if step == 2:
            store.delete(1)
            real_write(acks, b"-1\n")
        step += 1
    store.close()


if not stride:
    work(first, float("inf"))

for point in itertools.count(first, stride):
    child = os.fork()
    if child == 0:
        work(point, 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        print(point)
        break
