"""Steps that a run holds already because an earlier process recorded them: a restored run makes them once more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.schema.records import ScalarsRecord, StatsRecord


@dataclass(frozen=True, slots=True)
class Repeats:
    """Sketches of a step are written together, scalars one by one: of the last step some may be missing."""

    until: int
    """The first step that no process has recorded."""
    scalars: frozenset[tuple[int, int]]
    """(name id, step) of those that are on disk."""

    def is_known(self, record: StatsRecord) -> bool:
        return record.step < self.until

    def new_of(self, record: ScalarsRecord) -> ScalarsRecord:
        """Without what is on disk."""
        if record.steps.size == 0 or record.steps.min() >= self.until:
            return record
        keys = zip(record.name_ids.tolist(), record.steps.tolist(), strict=True)
        is_new = np.array([key not in self.scalars for key in keys], bool)
        columns = (record.name_ids, record.steps, record.times, record.values)
        return ScalarsRecord(*(column[is_new] for column in columns))
