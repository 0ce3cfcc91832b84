"""Items in the queue other than records, and the check that a record passes before it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from sonde.schema.addends import Addends
from sonde.schema.records import Event, ScalarsRecord, Shard, Site, StatsRecord
from sonde.schema.sketch import NUM_BINS, NUM_FIELDS

Record = StatsRecord | ScalarsRecord
LateRecord = Callable[[], Record | Event | Addends | Sequence[Record | Event] | None]
"""Called on the writer thread, where it may wait for a copy from the device."""


@dataclass(frozen=True, slots=True)
class NewSite:
    id: int
    site: Site


@dataclass(frozen=True, slots=True)
class NewShard:
    """The part of a site that this process records; it follows the site."""

    id: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class NewScalar:
    id: int
    name: str


@dataclass(frozen=True, slots=True)
class StepBegan:
    """Everything of the steps before this one was put."""

    step: int
    is_first: bool = False
    """No step has ended yet: steps are about to be made, and this will be the first."""
    visible: int = -1
    """With several training threads, the step of the one that is furthest ahead: steps before it are shown, although
    the other threads have not reached them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAttempt:
    """Training returns to this step; what follows belongs to a new attempt."""

    step: int
    after: int
    """The step that would have come next."""
    time: float
    """When training returned."""


class AttemptNumber:
    """The number of the current attempt. The writer thread knows it, and sets it once the attempt is in the catalog;
    from then on a return to an earlier step starts another attempt.

    >>> AttemptNumber(3).wait(0), AttemptNumber().wait(0)
    (3, None)
    """

    __slots__ = ("_is_known", "_number")

    def __init__(self, number: int | None = None) -> None:
        self._number, self._is_known = number, threading.Event()
        if number is not None:
            self._is_known.set()

    def tell(self, number: int) -> None:
        self._number = number
        self._is_known.set()

    def wait(self, timeout_s: float) -> int | None:
        """The number, or None if it is not known within the timeout."""
        self._is_known.wait(timeout_s)
        return self._number


@dataclass(frozen=True, slots=True)
class Facts:
    """Merged into run.json: under "facts", or at its top level."""

    facts: dict[str, Any]
    is_top: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A separate file next to run.json, replaced atomically and signed like it."""

    name: str
    content: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRow:
    """A finding for the catalog. One with a known number replaces the earlier one."""

    number: int
    """Counted from 0 in each session."""
    time: float
    rule: str
    severity: str
    confidence: float
    step: int
    last_step: int
    sites: list[str]
    message: str
    evidence: list[dict[str, Any]]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow:
    """Whole tensors that are on disk and visible, for the catalog's table of checkpoints or of snapshots."""

    table: Literal["checkpoints", "snapshots"]
    step: int
    time: float
    where: str
    """The folder of a checkpoint, or the store of a snapshot."""
    details: dict[str, Any]
    attempt: int | None = None
    """None: the attempt that was recorded at that time."""
    is_found: bool = False
    """An earlier process left it, and may have died before it wrote the row: an existing row stays."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """Set when everything queued before it is acknowledged."""

    reply: SimpleQueue[bool]
    is_asked: bool = False
    """Asks for everything recorded so far to be shown, including a step that has not ended."""


def check_record(record: Record) -> None:
    """Reject a frame whose counts do not match: it would make the rest of its log unreadable."""
    if isinstance(record, ScalarsRecord):
        columns = (record.name_ids, record.steps, record.times, record.values, record.made_at)
        if {column.shape for column in columns} != {(len(record.name_ids),)}:
            raise ValueError(f"scalar columns have shapes {[column.shape for column in columns]}")
        return
    num_rows, num_hists = len(record.site_ids), len(record.hist_index)
    if record.rows.shape != (num_rows, NUM_FIELDS) or record.hist.shape != (num_hists, NUM_BINS):
        raise ValueError(
            f"{num_rows} sites, rows of shape {record.rows.shape}, histograms of shape {record.hist.shape}"
        )
    if num_hists and not 0 <= record.hist_index.min() <= record.hist_index.max() < num_rows:
        raise ValueError("a histogram refers to a row that does not exist")


def join_scalars(records: list[ScalarsRecord]) -> ScalarsRecord:
    """One frame for all scalars of one flush."""
    if len(records) == 1:
        return records[0]
    is_ahead = any(record.counted is not None for record in records)
    return ScalarsRecord(
        np.concatenate([record.name_ids for record in records]),
        np.concatenate([record.steps for record in records]),
        np.concatenate([record.times for record in records]),
        np.concatenate([record.values for record in records]),
        np.concatenate([record.made_at for record in records]) if is_ahead else None,
    )
