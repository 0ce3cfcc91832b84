"""The training side: the only package that combines probe, reduce, budget and write.

    probe ─► reduce ─► write ─► (run folder)

`Session` is one recording. The functions below act on the session of this process.
"""

from __future__ import annotations

from sonde.session.entry.current import (
    active_session,
    batch,
    begin,
    finish,
    init,
    log,
    rewind,
    snapshot,
    step,
    tap,
    watch,
)
from sonde.session.entry.decorator import record
from sonde.session.entry.script import run_script
from sonde.session.null import NullSession
from sonde.session.observers.mirror import Mirror
from sonde.session.session import Session
from sonde.session.snapshot_plan import Snapshots

__all__ = [
    "Mirror",
    "NullSession",
    "Session",
    "Snapshots",
    "active_session",
    "batch",
    "begin",
    "finish",
    "init",
    "log",
    "record",
    "rewind",
    "run_script",
    "snapshot",
    "step",
    "tap",
    "watch",
]
