"""Trains in separate processes, with workers that load data, and saves a checkpoint at the end of each.

Arguments, six for each process: folder, optimizer, scheduler, steps already made (restored if any),
steps to reach, seed of what is not restored. Torch is imported once for all; a line of JSON tells what came of each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Training


def train(folder: str, optimizer: str, scheduler: str, first: str, last: str, seed: str) -> None:
    run = Training(optimizer, scheduler, num_workers=2, seed=int(seed))
    manager = run.manager(folder)
    if int(first):
        run.num_steps = manager.restore()
        assert run.num_steps == int(first)
    run.train(int(last))
    manager.save(int(last))
    print(json.dumps({"losses": run.losses, "fingerprint": run.fingerprint()}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Training()  # an optimizer, for what torch imports with the first one
    jobs = sys.argv[1:]
    while jobs:
        job, jobs = jobs[:6], jobs[6:]
        child = os.fork()
        if child == 0:
            train(*job)
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(os.waitstatus_to_exitcode(status))
