"""What travels through the queue besides records, and the check a record passes before it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import NUM_BINS, NUM_FIELDS

Record = StatsRecord | ScalarsRecord
LateRecord = Callable[[], Record | Event | Sequence[Record | Event] | None]
"""Called on the writer thread, where it may wait for a copy from the device."""


@dataclass(frozen=True, slots=True)
class NewSite:
    id: int
    site: Site


@dataclass(frozen=True, slots=True)
class NewScalar:
    id: int
    name: str


@dataclass(frozen=True, slots=True)
class StepBegan:
    """Everything of the steps below this one was put before."""

    step: int
    is_first: bool = False
    """Nothing has ended yet: steps are about to be made, and this will be the first."""
    visible: int = -1
    """Where several threads train, the step of the one that is furthest ahead: what is below it is shown, though the
    others have not come so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAttempt:
    """Training returns to this step; what follows belongs to a new attempt."""

    step: int
    after: int
    """The step that would have come next."""
    time: float
    """When training returned."""


class AttemptNumber:
    """The number of the attempt that is being recorded. The writer thread knows it, and tells it once the attempt is in
    the catalog; from then on a return to an earlier step begins another one.

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
        """The number, or None when it is not known after so long."""
        self._is_known.wait(timeout_s)
        return self._number


@dataclass(frozen=True, slots=True)
class Facts:
    """Merged into run.json: under "facts", or at its top."""

    facts: dict[str, Any]
    is_top: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A file of its own beside run.json, replaced whole and signed like it."""

    name: str
    content: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRow:
    """What a rule found, for the catalog. One with a number that is known replaces the earlier one."""

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
    """A checkpoint's folder, a snapshot's store."""
    details: dict[str, Any]
    attempt: int | None = None
    """None: the one that was recorded at that time."""
    is_found: bool = False
    """An earlier process left it, and may have died before it wrote the row: one that is there stays."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """Answered when everything queued before it is acknowledged."""

    reply: SimpleQueue[bool]
    is_asked: bool = False
    """Somebody wants to see what there is, of a step that has not ended as well."""


def check_record(record: Record) -> None:
    """A frame whose counts do not fit would make the rest of its log unreadable: refuse it here."""
    if isinstance(record, ScalarsRecord):
        columns = (record.name_ids, record.steps, record.times, record.values, record.made_at)
        if any(column.shape != (len(record.name_ids),) for column in columns):
            raise ValueError(f"columns of scalars have shapes {[column.shape for column in columns]}")
        return
    num_rows, num_hists = len(record.site_ids), len(record.hist_index)
    if record.rows.shape != (num_rows, NUM_FIELDS) or record.hist.shape != (num_hists, NUM_BINS):
        raise ValueError(
            f"{num_rows} sites, rows of shape {record.rows.shape}, histograms of shape {record.hist.shape}"
        )
    if num_hists and not 0 <= record.hist_index.min() <= record.hist_index.max() < num_rows:
        raise ValueError("a histogram belongs to a row that is not there")


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
