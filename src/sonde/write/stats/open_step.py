"""Which steps are complete: a step is once the next one has begun, because everything of it was put before.

The frame of scalars of each turn carries a mark that says so, and the sketches of the turn are synced before that
frame. So after a kill everything is there of the steps below the last mark on disk. Used in the writer thread only.
"""

from __future__ import annotations

from sonde.schema.attempts import NO_LIMIT, Mark
from sonde.schema.records import ScalarsRecord, StatsRecord


class OpenStep:
    """Of one attempt."""

    def __init__(self, complete: int = NO_LIMIT) -> None:
        self._complete = complete
        self._visible = -1
        self._is_counting = False
        self._last = -1
        self._names: set[int] = set()
        """Ids of the scalars logged in the first step, until it ends."""

    @property
    def mark(self) -> Mark:
        if self._complete == NO_LIMIT:
            return Mark()
        return Mark(self._complete, max(self._complete, self._visible))

    def began(self, step: int, *, is_first: bool = False, visible: int = -1) -> None:
        """Everything of the steps below this one was put. `is_first`: no step has ended yet. `visible`: where several
        threads count steps, how far the furthest is."""
        if is_first and self._is_counting:
            return
        self._complete, self._visible = step, max(self._visible, visible)
        self._is_counting = not is_first
        if self._is_counting:
            self._names.clear()

    def saw(self, record: StatsRecord | ScalarsRecord) -> None:
        if isinstance(record, StatsRecord):
            self._last = max(self._last, record.step)
            return
        if len(record.steps):
            self._last = max(self._last, int(record.made_at.max()))
        if not self._is_counting and self._complete != NO_LIMIT:
            self._doubt(record)

    def _doubt(self, record: ScalarsRecord) -> None:
        """A program that logs a name twice, or by its own count, before the first step has ended may never end a step.
        What it logs must not depend on that."""
        names = record.name_ids.tolist()
        if int(record.steps.max(initial=-1)) > self._complete or not self._names.isdisjoint(names):
            self._complete = NO_LIMIT
        self._names.update(names)

    def flushed(self) -> None:
        """The user flushed: what there is of the open step is shown even if the process is killed in it."""
        if self._complete != NO_LIMIT:
            self._visible = self._complete + 1

    def ended(self) -> Mark:
        """The mark of an attempt that ends properly: everything in it is complete."""
        complete = self._complete if self._complete == NO_LIMIT else max(self._complete, self._last + 1)
        return Mark(complete, NO_LIMIT)
