"""Cells of the unsealed data of a running run: each frame is read once, regardless of the number of requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

from sonde.read.run.segments import EVERYTHING
from sonde.read.series.heatmap import Heat, live_cells, record_cells
from sonde.schema.attempts import History
from sonde.schema.joined import JOINED
from sonde.schema.pooling import Cells, join, no_cells
from sonde.schema.records import StatsRecord

_MAX_PARTS: Final = 32


@dataclass(slots=True)
class LiveCells:
    """Cells that grow with the log. They may include data sealed meanwhile: counting a maximum twice is harmless."""

    _seen: int = -1
    """Sequence of the last frame that was read."""
    _parts: list[tuple[int, Cells]] = field(default_factory=list)
    """Cells, each with the sequence of its last frame."""
    _history: History | None = None
    """Attempts of the parts."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, heat: Heat) -> Cells:
        """The cells of the data that is unsealed now. Always called with the same stat and sites."""
        state, asked = heat.state, heat.asked
        logs = state.logs.get("stats", [])
        # Sites of a joined stat may come in two frames of one step, and sketches of several ranks are merged by step.
        if len(logs) != 1 or asked.stat in JOINED or state.is_divided:
            return live_cells(state, asked, EVERYTHING)
        sealed = state.last_sealed("stats", logs[0].rank)
        with self._lock:
            if state.history != self._history:
                self._history, self._seen, self._parts = state.history, -1, []
            frames = state.shown_frames(logs[0], after=max(self._seen, sealed))
            records = [frame.record for frame in frames if isinstance(frame.record, StatsRecord)]
            self._parts = [(last, cells) for last, cells in self._parts if last > sealed]
            if records:
                self._seen = max(frame.sequence for frame in frames)
                self._parts.append((self._seen, record_cells(asked, records)))
            if len(self._parts) > _MAX_PARTS:
                self._parts = [(self._parts[-1][0], join([cells for _, cells in self._parts]))]
            parts = [cells for _, cells in self._parts]
        return join(parts) if parts else no_cells(len(asked.rows))
