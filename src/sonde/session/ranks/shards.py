"""Ranks that hold parts of the model: each records its own, into a folder inside the run of the first rank.

Nothing is sent between ranks. A rank finds the run by the note of the first one, and whoever reads the run merges the
sketches of one step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final, Protocol

import psutil
from torch import nn

from sonde.config import Settings
from sonde.probe.sharded import has_shards
from sonde.write.folder import create_rank
from sonde.write.ranks import find_announced

PATIENCE_S: Final = 20.0
"""How long `watch` waits on a sharded rank for the first rank to start its run. All ranks usually call it at once."""
_POLL_S: Final = 0.02
_SLACK_S: Final = 60.0
"""The first rank may have started this much before this process. An older note is that of a job that crashed."""


def records_shards(model: nn.Module) -> bool:
    """Whether a rank other than the first has parameters that no other rank has: parts of tensors, or the modules of
    its stage of a pipeline."""
    return has_shards(model) or "torch.distributed.pipelining" in sys.modules


class StartSession(Protocol):
    """Creates the session of a rank, which records as the first one does."""

    def __call__(self, run: Path, settings: Settings, *, resume: bool, rank: int, first_step: int) -> Any: ...


def begin_shards(start: StartSession, settings: Settings, rank: int) -> Any:
    """The session of this rank; None if the first rank does not record."""
    end = time.monotonic() + PATIENCE_S
    since = psutil.Process().create_time()
    while (found := find_announced(settings.dir, since=since, slack_s=_SLACK_S)) is None:
        if time.monotonic() > end:
            return None
        time.sleep(_POLL_S)
    own = settings.changed(verbose=False, live_rules=False, system_metrics=False)
    return start(create_rank(found.run, rank), own, resume=True, rank=rank, first_step=found.step)
