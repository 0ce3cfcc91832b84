"""Following of a run while it is written: each new row once, in the order in which it reached the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.catalog import Segment
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import ALL_STEPS, StepFilter
from sonde.read.series.cut import edges
from sonde.read.series.scalars import Columns, find_names, record_columns, scalar_table, sealed_scalars
from sonde.read.series.stats import ask, read_stats
from sonde.schema.layout import RunStatus
from sonde.schema.records import ScalarsRecord

Patterns = str | Sequence[str]
_SERIES = ("kind", "site", "stat")
_LATE_STEPS = 64
"""Rows of one step may reach the disk a few steps apart; rows that are later than this are missed."""


@dataclass(frozen=True, slots=True)
class Update:
    """New rows, as long tables like those of `Run.stats` and `Run.scalars`, and the status of the run."""

    stats: pa.Table
    scalars: pa.Table
    status: RunStatus
    last_step: int
    rewound_to: int | None = None
    """The step to which training returned since the last update: rows yielded for it and later steps are abandoned."""


def follow(state: RunState, stats: Patterns, scalars: Patterns, *, poll_s: float) -> Iterator[Update]:
    """Yield an Update whenever there are new rows; ends when the run has ended and everything was yielded."""
    state.refresh()
    new_stats, new_scalars, returns = _NewStats(stats), _NewScalars(scalars), _Returns(state)
    while True:
        status = state.status().status  # checked before reading, so that everything written until then is seen
        state.refresh()
        rewound_to = returns.take(state)
        if rewound_to is not None:
            new_stats.forget(rewound_to)
        update = Update(new_stats.take(state), new_scalars.take(state), status, state.last_step(), rewound_to)
        has_ended = status != "running"
        if update.stats.num_rows or update.scalars.num_rows or has_ended or rewound_to is not None:
            yield update
        if has_ended:
            return
        time.sleep(poll_s)


class _Returns:
    """Attempts that started since the last check."""

    def __init__(self, state: RunState) -> None:
        self._num_known = len(state.history.attempts)

    def take(self, state: RunState) -> int | None:
        new, self._num_known = state.history.attempts[self._num_known :], len(state.history.attempts)
        return min((attempt.first_step for attempt in new if attempt.number), default=None)


@dataclass(slots=True)
class _NewStats:
    """Follows series by their last step: within an attempt, steps only grow."""

    patterns: Patterns
    last_step: int = -1
    last_of: dict[str, int] = field(default_factory=dict)

    def take(self, state: RunState) -> pa.Table:
        # Sites appear when they are first measured: a plain name that does not exist yet is not an error.
        patterns = [self.patterns] if isinstance(self.patterns, str) else list(self.patterns)
        known = [pattern for pattern in patterns if ask(state.catalog.sites, pattern, strict=False).wanted]
        first = max(self.last_step - _LATE_STEPS, -1) if self.last_step >= 0 else ALL_STEPS.span.first
        table = read_stats(state, known, StepFilter(Span(first, ALL_STEPS.span.last)))
        self.last_step = max(self.last_step, state.last_step())
        return table.filter(pa.array(self._is_new(table), pa.bool_()))

    def forget(self, step: int) -> None:
        """Forget the rows from this step on, to which training returned."""
        self.last_step = min(self.last_step, step - 1)
        self.last_of = {key: min(last, step - 1) for key, last in self.last_of.items()}

    def _is_new(self, table: pa.Table) -> NDArray[np.bool_]:
        steps = table["step"].to_numpy()
        fresh = np.zeros(table.num_rows, np.bool_)
        for start, end in pairwise(edges(table, _SERIES)):
            key = "/".join(table[name][start].as_py() for name in _SERIES)
            fresh[start:end] = steps[start:end] > self.last_of.get(key, -1)
            self.last_of[key] = max(self.last_of.get(key, -1), int(steps[end - 1]))
        return fresh


@dataclass(slots=True)
class _NewScalars:
    """Follows scalars by the sequence of their records, because they may be logged at any step."""

    patterns: Patterns
    seen: dict[int, dict[int, ScalarsRecord]] = field(default_factory=dict)
    """By rank: records seen that were not sealed at the last check, by sequence."""
    cursor: dict[int, int] = field(default_factory=dict)

    def take(self, state: RunState) -> pa.Table:
        names = find_names(state.catalog.scalar_names, self.patterns, strict=False)
        parts = []
        for segment in state.segments_of("scalars"):
            if segment.last_sequence > self.cursor.get(segment.rank, -1):
                columns = self._sealed(state, segment, names)
                if columns is not None:
                    parts.append(self._unseen(columns, segment.rank, segment.first_sequence))
                self.cursor[segment.rank] = segment.last_sequence
        for log in state.logs.get("scalars", []):
            sealed = state.last_sealed("scalars", log.rank)
            seen = self.seen.setdefault(log.rank, {})
            for sequence in [number for number in seen if number <= sealed]:
                del seen[sequence]
            for frame in state.shown_frames(log, after=max(sealed, self.cursor.get(log.rank, -1))):
                if isinstance(frame.record, ScalarsRecord):
                    seen[frame.sequence] = frame.record
                    self.cursor[log.rank] = frame.sequence
                    parts.append(record_columns(frame.record))
        return scalar_table(names, parts, ALL_STEPS)

    @staticmethod
    def _sealed(state: RunState, segment: Segment, names: dict[int, str]) -> Columns | None:
        try:
            return sealed_scalars(state, segment, names, ALL_STEPS)
        except CorruptError as error:
            state.damage[segment.name] = str(error)
            return None

    def _unseen(self, columns: Columns, rank: int, first: int) -> Columns:
        records = [record for sequence, record in self.seen.get(rank, {}).items() if sequence >= first]
        if not records:
            return columns
        seen = {row for record in records for row in _rows(record_columns(record))}
        fresh = np.array([row not in seen for row in _rows(columns)], np.bool_)
        return {key: column[fresh] for key, column in columns.items()}


def _rows(columns: Columns) -> list[tuple[int, int, float]]:
    return list(zip(*(columns[key].tolist() for key in ("name", "step", "time")), strict=True))
