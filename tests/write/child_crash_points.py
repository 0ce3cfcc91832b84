"""Records the same run over and over, each time dying at the next system call the writer makes.

Arguments: folder for the runs, first point, stride. Point n's run is `<folder>/<n>`; its acknowledged step is in
`<folder>/<n>.ack`. Ends with the first run that came to its end, and prints that point.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import sonde.write.stats.parquet  # noqa: F401  once, before the forks
from conftest import put_steps
from sonde.write.folder import create_run
from sonde.write.stats.catalog import Catalog
from sonde.write.writer import Writer, WriterOptions

folder, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
real_write = os.write


def crash_at(point: int) -> None:
    """Before the n-th call that touches the disk the process is gone; a write may have done half of its work."""
    calls = itertools.count()

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == point:
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os._exit(9)
            return real(*arguments, **keywords)

        setattr(owner, name, call)

    for name in ("write", "fsync", "fdatasync", "replace", "unlink", "open"):
        wrap(os, name)
    wrap(Catalog, "commit")


def train(point: int) -> None:
    run = create_run(folder / str(point), project="project", name="name")
    options = WriterOptions(flush_interval_s=60, heartbeat_s=0.001, seal_steps=8, system_interval_s=0)
    acks = os.open(folder / f"{point}.ack", os.O_CREAT | os.O_WRONLY)
    writer = Writer(run, options)
    crash_at(point)
    for step in range(0, 20, 5):
        put_steps(writer, range(step, step + 5))
        if writer.flush(30):
            os.lseek(acks, 0, os.SEEK_SET)
            real_write(acks, f"{step + 4}\n".encode())
    writer.close("finished")
    os._exit(0)


for point in itertools.count(first, stride):
    child = os.fork()
    if child == 0:
        train(point)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        print(point)
        break
