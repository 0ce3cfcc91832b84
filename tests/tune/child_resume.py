"""Trains in a process of its own, with workers that load data, and saves a checkpoint at the end.

Arguments: folder, optimizer, scheduler, steps already made (restored if any), steps to reach,
seed of what is not restored.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from conftest import Training

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, optimizer, scheduler, first, last, seed = sys.argv[1:]
    run = Training(optimizer, scheduler, num_workers=2, seed=int(seed))
    manager = run.manager(folder)
    if int(first):
        run.num_steps = manager.restore()
        assert run.num_steps == int(first)
    run.train(int(last))
    manager.save(int(last))
    print(json.dumps({"losses": run.losses, "fingerprint": run.fingerprint()}))
