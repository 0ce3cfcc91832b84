"""One stream of a run on the writer's side: frames waiting for the disk, the open log, and sealed segments.

A frame stays in memory until `fdatasync` has returned, so that after a failed sync it can be written again elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sonde.schema.attempts import History, Mark
from sonde.schema.layout import Stream, stream_folder
from sonde.schema.records import Frame, ScalarsRecord, StatsRecord, encode_frame
from sonde.write.durable import make_folder
from sonde.write.stats.catalog import Segment
from sonde.write.stats.log import Log, cut, next_log_path, recover, remove_leftovers
from sonde.write.stats.seal import SegmentKey, seal_table, sort_frames
from sonde.write.stats.table import StatsTable


@dataclass(frozen=True, slots=True)
class Sealed:
    """A segment, its attempt, its table if it holds sketches, and the number of unreadable acknowledged frames."""

    segment: Segment
    attempt: int
    mark: Mark | None
    """The mark of its last frame."""
    table: StatsTable | None
    num_lost: int


class StreamWriter:
    """Opened over the data of an earlier writer: nothing valid is lost, and sequences continue."""

    def __init__(self, run: Path, stream: Stream, rank: int, segments: Sequence[Segment]) -> None:
        self.run, self.stream, self.rank = run, stream, rank
        self.folder = stream_folder(run, stream, rank)
        make_folder(self.folder)
        remove_leftovers(self.folder)
        sealed = [s for s in segments if (s.stream, s.rank, s.level) == (stream, rank, 0)]
        self.num_segments = len(sealed)
        self.sealed_sequence = max((s.last_sequence for s in sealed), default=-1)
        found = recover(self.folder, after=self.sealed_sequence)
        self.num_torn_bytes, self.num_damaged_bytes = found.num_torn_bytes, found.num_damaged_bytes
        self.acknowledged = max(found.frames, default=self.sealed_sequence)
        self._known = [(s.last_sequence, s.last_step) for s in sealed]
        self._known += [(frame.sequence, frame.record.last_step) for frame in found.frames.values()]
        self.last_mark = next((frame.mark for frame in reversed(found.frames.values())), None)
        """The mark in the last frame of an earlier writer; None if its frames are all sealed."""
        self.next_sequence = self.acknowledged + 1
        # Old logs are never appended to: they are sealed, and the next frame opens a new one.
        self.log: Log | None = None
        self.is_recovered = bool(found.num_bytes)
        self.num_frames = len(found.frames)
        self.num_bytes = found.num_bytes
        self._waiting: list[bytes] = []

    def last_step(self, history: History) -> int:
        """The last step of an earlier writer that was not abandoned; -1 if there is none."""
        limits = [history.limit(attempt.number) for attempt in history.attempts]
        found = [
            min(step, limits[history.attempt_of(self.stream, sequence)] - 1) if limits else step
            for sequence, step in self._known
        ]
        return max(found, default=-1)

    def add(self, record: StatsRecord | ScalarsRecord, mark: Mark = Mark()) -> None:  # noqa: B008 - frozen
        """Number a record and hold it for the next `flush`."""
        self._waiting.append(encode_frame(self.next_sequence, record, mark))
        self.next_sequence += 1

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def flush(self) -> None:
        """Write and sync waiting frames. After an error everything still waits."""
        if not self._waiting:
            return
        frames = b"".join(self._waiting)
        log = self._trusted_log()
        log.append(frames)
        try:
            log.sync()
        except OSError:
            self._leave(log)
            raise
        self.num_frames += len(self._waiting)
        self.num_bytes += len(frames)
        self.acknowledged = self.next_sequence - 1
        self._waiting.clear()

    def seal(self, segment_id: int, history: History) -> Sealed | None:
        """Seal acknowledged frames of the first attempt with rows into one segment. None if no frame has any."""
        found = recover(self.folder, after=self.sealed_sequence)
        frames = [frame for frame in found.frames.values() if frame.sequence <= self.acknowledged]
        attempts = [history.attempt_of(self.stream, frame.sequence) for frame in frames]
        attempt = next((n for n, frame in zip(attempts, frames, strict=True) if _has_rows(frame)), None)
        if attempt is None:
            return None
        frames = [frame for n, frame in zip(attempts, frames, strict=True) if n <= attempt]
        is_rest = len(frames) == len(attempts)
        last_sequence = self.acknowledged if is_rest else frames[-1].sequence
        num_lost = last_sequence - self.sealed_sequence - len(frames)
        table, mark = sort_frames(self.stream, frames), frames[-1].mark
        del found, frames  # free the bytes of the log before the segment allocates its own memory
        place = SegmentKey(
            segment_id,
            self.stream,
            self.rank,
            0,
            self.num_segments,
            self.sealed_sequence + 1,
            last_sequence,
            attempt,
        )
        segment = seal_table(self.run, place, table)
        return Sealed(segment, attempt, mark, table if isinstance(table, StatsTable) else None, num_lost)

    def mark_sealed(self, segment: Segment) -> None:
        """Called when the catalog has the segment."""
        self.sealed_sequence = segment.last_sequence
        self.num_segments += 1

    @property
    def is_sealed(self) -> bool:
        return self.sealed_sequence == self.acknowledged

    def cut(self) -> None:
        """Start an empty log. Only when nothing waits and everything is sealed."""
        assert self.is_sealed
        old = self.log
        self.log = cut(self.folder)
        self.is_recovered = False
        self.num_frames = self.num_bytes = 0
        if old is not None:
            old.close()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _trusted_log(self) -> Log:
        if self.log is not None and not self.log.is_trusted:
            self._leave(self.log)
        if self.log is None:
            self.log = Log(next_log_path(self.folder))
        return self.log

    def _leave(self, log: Log) -> None:
        log.close()
        self.log = None


def _has_rows(frame: Frame) -> bool:
    record = frame.record
    return bool(len(record.site_ids) if isinstance(record, StatsRecord) else len(record.steps))
