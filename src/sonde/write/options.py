"""Intervals and limits of the writer: flushing, sealing, heartbeats, and memory."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Defaults suit a training job; tests use small values."""

    flush_interval_s: float = 0.5
    """Records are on disk after this long."""
    flush_mib: float = 1.0
    """Or as soon as this much is waiting."""
    seal_steps: int = 1024
    """Recorded steps per sealed segment."""
    seal_mib: float = 16.0
    """Or as soon as the log is this large."""
    queue_mib: float = 64.0
    """Limit of records that wait for the writer; above it, records are dropped and counted."""
    heartbeat_s: float = 2.0
    """Interval of the heartbeat in run.json."""
    system_interval_s: float = 10.0
    """Interval between system samples; 0 for never."""
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("flush_interval_s", "flush_mib", "seal_steps", "seal_mib", "queue_mib", "heartbeat_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive; got {getattr(self, name)!r}.")
        for name in ("system_interval_s", "rank"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must not be negative; got {getattr(self, name)!r}.")
