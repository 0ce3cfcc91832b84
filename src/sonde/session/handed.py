"""What another framework has computed, sketches and numbers: the writer waits for it, the training does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

import numpy as np

from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import NUM_BINS, Array
from sonde.session.session import Session


def put_rows(
    session: Session, sites: Sequence[Site], rows: Callable[[], tuple[Array, Array] | None], *, step: int | None = None
) -> None:
    """Record a row of numbers for each site, with a histogram each or none at all. `rows` is called on the writer
    thread, and may wait there for a device; None is nothing to record."""
    ids = np.array([session.writer.site_id(site) for site in sites], np.int32)
    at = session.step_number if step is None else step
    now = time.time()

    def resolve() -> StatsRecord | None:
        found = rows()
        if found is None:
            return None
        values, hist = found
        return StatsRecord(at, now, ids, values, np.arange(len(hist), dtype=np.int32), hist.astype(np.float32))

    session.writer.put(resolve, len(ids) * 8 * NUM_BINS, step=at)


def put_scalars(session: Session, values: Mapping[str, SupportsFloat], *, step: int | None = None) -> None:
    """Record numbers that may still be on a device; `float(value)` is called on the writer thread."""
    at = session.step_number if step is None else step
    ids = np.array([session.writer.scalar_id(name) for name in values], np.int32)
    times = np.full(len(ids), time.time())
    given = list(values.values())

    def resolve() -> ScalarsRecord:
        return ScalarsRecord(ids, np.full(len(ids), at, np.int64), times, np.array([float(v) for v in given]))

    session.writer.put(resolve, 64 * len(ids), step=at, stream="scalars")
