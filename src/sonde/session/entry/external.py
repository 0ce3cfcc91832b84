"""Sketches and numbers computed by another framework: the writer waits for them, training does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import SupportsFloat

import numpy as np

from sonde.probe.optimizer.hyperparameters import Hyperparameters
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import NUM_BINS, Array
from sonde.session.recording import Recording
from sonde.session.scalars import put_numbers


def put_rows(
    recording: Recording,
    sites: Sequence[Site],
    rows: Callable[[], tuple[Array, Array] | None],
    *,
    step: int | None = None,
) -> None:
    """Record a row of numbers for each site, with a histogram each or none at all. `rows` is called on the writer
    thread and may wait there for a device; None records nothing."""
    ids = np.array([recording.writer.site_id(site) for site in sites], np.int32)
    at = recording.step_number if step is None else step
    now = time.time()

    def resolve() -> StatsRecord | None:
        found = rows()
        if found is None:
            return None
        values, hist = found
        return StatsRecord(at, now, ids, values, np.arange(len(hist), dtype=np.int32), hist.astype(np.float32))

    recording.writer.put(resolve, len(ids) * 8 * NUM_BINS, step=at)


def put_scalars(recording: Recording, values: Mapping[str, SupportsFloat], *, step: int | None = None) -> None:
    """Record numbers that may still be on a device; `float(value)` is called on the writer thread."""
    at = recording.step_number if step is None else step
    put_numbers(recording, {name: partial(float, value) for name, value in values.items()}, at)


def put_settings(
    recording: Recording, known: Hyperparameters, names: Sequence[str], values: Callable[[], Array]
) -> None:
    """Record hyperparameters that are still on a device: learning rates, and any others that have changed.

    `values` is called on the writer thread, in step order, and so is `known`.
    """
    at, now = recording.step_number, time.time()
    ids = {name: recording.writer.scalar_id(f"optim/{name}") for name in names}

    def resolve() -> ScalarsRecord | None:
        numbers = zip(names, values().tolist(), strict=True)
        rows = [(ids[name], step, value) for step, found in known.at(numbers, at) for name, value in found.items()]
        if not rows:
            return None
        which, steps, found = (np.array(column) for column in zip(*rows, strict=True))
        return ScalarsRecord(which.astype(np.int32), steps.astype(np.int64), np.full(len(rows), now), found)

    recording.writer.put(resolve, 64 * len(names), step=at, stream="scalars")
