"""Turns records into frames: each belongs to an attempt, and the scalar frame of a turn carries the turn's mark.

An attempt is in the catalog before its first frame is written, and the sketches of a turn are synced before its
scalars. So after a kill the disk shows which attempt every frame belongs to and which steps are complete: a step is
complete once the next one has started, because everything of it was put before. Used in the writer thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.schema.attempts import NO_LIMIT, Mark
from sonde.schema.layout import Stream
from sonde.schema.records import ScalarsRecord, StatsRecord
from sonde.write.items import NewAttempt, StepBegan, join_scalars
from sonde.write.stats.attempts import Attempts
from sonde.write.stats.catalog import Row, attempt_row, event_row
from sonde.write.stats.stream import StreamWriter


class Journal:
    """The two streams of a run and its attempts; `content` is that of run.json as the last writer left it."""

    def __init__(
        self,
        streams: Mapping[Stream, StreamWriter],
        attempts: Attempts,
        content: Mapping[str, Any],
        *,
        is_same_attempt: bool,
        first_step: int | None = None,
    ) -> None:
        self._first_step = first_step
        self.streams, self.attempts = streams, attempts
        self._was = str(content.get("status"))
        self._scalars: list[ScalarsRecord] = []
        self._returning: NewAttempt | None = None
        self._is_beginning = False
        self.next_step = self._begin(content, is_same_attempt=is_same_attempt)
        self._open = OpenStep(attempts.current.mark.complete if is_same_attempt else NO_LIMIT)
        self._last_mark = self._open.mark

    def _begin(self, content: Mapping[str, Any], *, is_same_attempt: bool) -> int:
        """Start the attempt of this process. Returns its first step."""
        attempts, mark = self.attempts, self.streams["scalars"].last_mark
        has_rows = any(stream.next_sequence for stream in self.streams.values())
        if not attempts.all:
            attempts.begin_first(float(content.get("created_time") or 0.0))
        elif mark is not None:
            attempts.set_mark(attempts.current.number, mark)
        complete = attempts.current.mark.complete
        is_ahead = bool((content.get("facts") or {}).get("logged_ahead"))
        next_step = self._behind_all(content, is_ahead=is_ahead) if complete == NO_LIMIT else complete
        if self._first_step is not None:
            next_step = self._first_step
        # Without counted steps, the real step of a number that was logged ahead is unknown: a new attempt would abandon
        # it.
        if has_rows and not is_same_attempt and not (is_ahead and complete == NO_LIMIT):
            attempts.begin(next_step, "resume", after=next_step)
        return next_step

    def _behind_all(self, content: Mapping[str, Any], *, is_ahead: bool) -> int:
        """The first step after everything recorded, for runs of format 1 and runs whose steps were not counted. Numbers
        that the user logged by their own count are not steps."""
        last_steps = {name: stream.last_step(self.attempts.history) for name, stream in self.streams.items()}
        num_counted = max(last_steps["stats"] + 1, int((content.get("heartbeat") or {}).get("step", 0)))
        return num_counted if is_ahead and num_counted > 0 else max(last_steps.values()) + 1

    # ---------------------------------------------------------------------------------------------------------- records

    @property
    def attempt(self) -> int:
        return self.attempts.current.number

    def add(self, record: StatsRecord | ScalarsRecord) -> None:
        if isinstance(record, StatsRecord):
            self.streams["stats"].add(record)
        else:
            self._scalars.append(record)
        self._open.saw(record)

    def step_began(self, item: StepBegan) -> int:
        """Store the mark of a step. The mark of the first step is stored before anything of that step, so that a kill
        cannot leave sketches of a step that no mark covers. Returns the same as `end_turn`."""
        self._open.began(item.step, is_first=item.is_first, visible=item.visible)
        is_first = self._last_mark.complete == NO_LIMIT and self._open.mark.complete != NO_LIMIT
        self._is_beginning = is_first and self.attempts.has_frames
        return self.end_turn() if self._is_beginning else 0

    def require_frame(self) -> int:
        """The number of the attempt, which has a frame from now on: whole tensors belong to it, so it must be in the
        catalog, and must not be moved to another step."""
        if not self.attempts.has_frames:
            self._last_mark = self._open.mark
            self.streams["scalars"].add(ScalarsRecord.empty(), self._last_mark)
        return self.attempt

    def asked_for(self) -> None:
        """The user flushed: records of the open step must be shown, too."""
        self._open.flushed()

    @property
    def num_pending(self) -> int:
        """Scalar records that are in no frame yet."""
        return len(self._scalars)

    def end_turn(self) -> int:
        """Make one frame of everything that was logged. Returns the number of values."""
        return self._add_scalars(self._open.mark)

    def _add_scalars(self, mark: Mark) -> int:
        scalars, self._scalars = self._scalars, []
        if not scalars and (mark == self._last_mark or not self.attempts.has_frames):
            return 0
        record = join_scalars(scalars) if scalars else ScalarsRecord.empty()
        self.streams["scalars"].add(record, mark)
        self._last_mark = mark
        return len(record.steps)

    # --------------------------------------------------------------------------------------------------------- attempts

    def return_to(self, item: NewAttempt) -> int:
        """End the attempt; `begin_turn` starts the next one, once all of this one is stored. Returns the same as
        `end_turn`."""
        self._returning = item
        return self.end_attempt()

    @property
    def must_store(self) -> bool:
        """Whether the waiting frames must be stored before another record is added."""
        return self._is_beginning or self._returning is not None

    def begin_turn(self) -> None:
        """Start the attempt that training returned for. If the current one has recorded nothing, it is moved
        instead."""
        item, self._returning, self._is_beginning = self._returning, None, False
        if item is None:
            return
        if self.attempts.has_frames:
            self.attempts.set_mark(self.attempt, self._last_mark)
            self.attempts.begin(item.step, "rewind", after=item.after, moment=item.time)
        else:
            self.attempts.move(item.step)
        self._open = OpenStep()
        self._last_mark = self._open.mark

    def end_attempt(self) -> int:
        """Add the last mark of the attempt. Returns the same as `end_turn`."""
        return self._add_scalars(self._open.ended())

    # ------------------------------------------------------------------------------------------------------------- disk

    def rows(self) -> list[Row]:
        """Catalog rows that must be committed before the waiting frames are written."""
        if self.attempts.is_stored or not any(stream.is_waiting for stream in self.streams.values()):
            return []
        if (
            self._last_mark.complete != NO_LIMIT
        ):  # nothing of it is on disk: later records are complete when their mark says so
            first_step = self.attempts.current.first_step
            self.attempts.set_mark(self.attempt, Mark(first_step, first_step))
        event = self.attempts.event(self._was)
        events = [] if event is None else [event_row(event, self.attempt)]
        return [*map(attempt_row, self.attempts.unstored()), *events]

    def flush(self) -> None:
        """Write sketches first: the mark in the scalars refers to them."""
        self.streams["stats"].flush()
        self.streams["scalars"].flush()


class OpenStep:
    """The marks of one attempt."""

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
        """Everything of the steps before this one was put. `is_first`: no step has ended yet. `visible`: with several
        training threads, the step of the furthest."""
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
        Its values must not depend on that."""
        names = record.name_ids.tolist()
        if int(record.steps.max(initial=-1)) > self._complete or not self._names.isdisjoint(names):
            self._complete = NO_LIMIT
        self._names.update(names)

    def flushed(self) -> None:
        """The user flushed: records of the open step are shown even if the process is killed during it."""
        if self._complete != NO_LIMIT:
            self._visible = self._complete + 1

    def ended(self) -> Mark:
        """The mark of an attempt that ends properly: everything in it is complete."""
        complete = self._complete if self._complete == NO_LIMIT else max(self._complete, self._last + 1)
        return Mark(complete, NO_LIMIT)
