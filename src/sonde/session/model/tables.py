"""The sketches of a step for the writer, which waits for those still being copied from a device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from sonde.reduce.torch import Table, resolve_all
from sonde.schema.records import StatsRecord

if TYPE_CHECKING:
    from sonde.session.training.writer import StepWriter
    from sonde.write.writer import Writer


def put_tables(writer: Writer | StepWriter, tables: list[Table], step: int) -> None:
    now = time.time()

    def resolve() -> StatsRecord:
        keys, rows, hist_index, hist = resolve_all(tables)
        return StatsRecord(step, now, keys, rows, hist_index, hist.astype(np.float32))

    writer.put(resolve, sum(t.num_bytes for t in tables), step=step)
