"""The state of a run folder at one moment: manifest, live frames and catalog, read in an order that misses no row."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.addends import Sums
from sonde.read.run.catalog import Catalog, Segment, lost_attempts, read_catalog
from sonde.read.run.folder import read_manifest
from sonde.read.run.log import StreamLog, list_folder
from sonde.read.run.losses import loss_warnings
from sonde.read.run.manifest import Manifest
from sonde.read.run.segments import SegmentReader
from sonde.read.run.status import Status, announced_ending, is_alive, is_locked, true_status
from sonde.schema.attempts import History, Mark
from sonde.schema.layout import CATALOG_FILE, RANK_CATALOG_FILE, RUN_FILE, STREAMS, Stream
from sonde.schema.records import Frame, StatsRecord

_RANK: Final = re.compile(r"rank-\d{4,8}")


class RankIds(Protocol):
    """The ids that another rank has given to the sites."""

    to_shown: NDArray[np.int64]
    """By its own id: the id of the site in the run; -1 for rows that do not count."""

    def own(self, sites: NDArray[np.int64]) -> NDArray[np.int64]:
        """Its own ids of sites of the run, sorted."""


@dataclass
class RunState:
    """The state of a run folder, refreshed before each query; an unchanged run is not read again."""

    run: Path
    manifest: Manifest
    view: int | None = None
    """The selected attempt; None for the last."""
    catalog: Catalog = field(default_factory=Catalog)
    history: History = field(default_factory=History)
    """The attempts up to the selected one."""
    logs: dict[Stream, list[StreamLog]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Problems of the folder as a whole; readers add damage that they find."""
    damage: dict[str, str] = field(default_factory=dict)
    """Damage found while reading series, by file."""
    segments: SegmentReader = field(init=False)
    _shown: dict[tuple[Stream, int], list[Segment]] = field(default_factory=dict)
    _live: dict[Stream, list[Frame]] = field(default_factory=dict)
    _signature: object = None

    def __post_init__(self) -> None:
        self.segments = SegmentReader(self.run)

    def refresh(self) -> None:
        """Read the manifest, then the logs, then the catalog.

        Rows sealed meanwhile are then in a log that was read or in the catalog, and acknowledged rows in one of them.
        """
        signature = self._signature_now()
        if signature == self._signature:
            return
        for _ in range(3):
            self.manifest = read_manifest(self.run)
            self._read_logs()
            self._read_catalog()
            # A log that was truncated while being read looks damaged until it is read again.
            if not self.problems or not self.is_held:
                break
        self._signature = signature

    def _signature_now(self) -> object:
        files = [RUN_FILE, CATALOG_FILE, f"{CATALOG_FILE}-wal", RANK_CATALOG_FILE]
        for stream in STREAMS:
            for folder in list_folder(self.run, stream):
                names = list_folder(self.run, stream, folder)
                files.extend(f"{stream}/{folder}/{name}" for name in names if name.endswith(".log"))
        return [self.is_dead, *((file, file_signature(self.run / file)) for file in files)]

    def _read_logs(self) -> None:
        self.problems = []
        for stream in STREAMS:
            old = {log.rank_folder: log for log in self.logs.get(stream, [])}
            folders = [name for name in list_folder(self.run, stream) if _RANK.fullmatch(name)]
            self.logs[stream] = [old.get(name) or StreamLog(self.run, stream, name) for name in folders]
            for log in self.logs[stream]:
                log.refresh()
                self.problems.extend(log.problems)

    def _read_catalog(self) -> None:
        try:
            self.catalog = read_catalog(self.run, is_live=self.is_held)
            if len(self.catalog.attempts) <= self.manifest.heartbeat.attempt:
                raise lost_attempts(self.run)
            self.catalog = replace(self.catalog, missing_files=self._missing_files())
        except CorruptError as error:
            self.catalog = Catalog(problems=(str(error),), error=error)
        self.problems.extend(self.catalog.problems)
        self._shown, self._live = {}, {}
        self.history = self._read_history()
        for stream in STREAMS:
            self.problems.extend(self._lost(stream))
            self.problems.extend(self._nameless(stream))

    def _missing_files(self) -> tuple[str, ...]:
        """Sealed files that the catalog lists and that do not exist. Lists folders; opens no file."""
        sealed = [segment for segment in self.catalog.segments if segment.level == 0]
        folders = {segment.parts[:-1] for segment in sealed}
        present = {folder: set(list_folder(self.run, *folder)) for folder in folders}
        return tuple(segment.name for segment in sealed if segment.parts[-1] not in present[segment.parts[:-1]])

    def _read_history(self) -> History:
        """Hide the incomplete last step of a process that was killed."""
        attempts = list(self.catalog.attempts)
        if attempts:
            last = attempts[-1]
            marks = [
                frame.mark
                for log in self.logs.get("scalars", [])
                for frame in log.frames(last.scalars_sequence - 1)
                if frame.mark is not None
            ]
            attempts[-1] = replace(last, mark=(marks or [last.mark])[-1] if self.is_dead else Mark())
        history = History(tuple(attempts))
        return history if self.view is None else history.until(self.view)

    @property
    def is_dead(self) -> bool:
        """Whether the recording process was killed."""
        return self.manifest.status == "running" and not self.is_alive

    @property
    def is_alive(self) -> bool:
        return self.manifest.status == "running" and is_alive(self.run, self.manifest)

    @property
    def is_held(self) -> bool:
        """Whether a writer may still change the files: it keeps sealing for a moment after its final status."""
        return is_locked(self.run) is not False

    @property
    def is_divided(self) -> bool:
        """Whether the rows of one step may be in files of several ranks, so that no file has a whole sketch."""
        return False

    def ids_in(self, segment: Segment) -> RankIds | None:
        """The ids that a file of another rank has for the sites; None if they are the same."""
        return None

    def is_whole(self, site: NDArray[np.int64], count: NDArray[np.float64], *, is_merged: bool) -> Any:
        """A mask of the rows that have all parts of their tensor, by their number of elements; None if all have.
        `is_merged`: rows may cover several steps."""
        return None

    def events_of_ranks(self) -> list[tuple[Any, ...]]:
        """(time, step, type, severity, message, details) of visible events in the folders of other ranks."""
        return []

    def by_rank(self) -> dict[int, RunState]:
        """The records of each rank, by its number."""
        return {self.manifest.rank: self}

    def scalar_homes(self, wanted: Collection[int]) -> list[tuple[RunState, dict[int, int]]]:
        """Those of these scalars that only other ranks have logged: the state of a rank, and the ids in the run by its
        own."""
        return []

    def sums(self) -> Sums | None:
        """Tensors that are the sum over ranks; None if there are none."""
        return None

    def segments_of(self, stream: Stream, level: int = 0) -> list[Segment]:
        """Sealed files with visible rows, of all ranks."""
        return self.own_segments(stream, level)

    def live_frames(self, stream: Stream) -> list[Frame]:
        """Visible frames of all ranks that are not sealed yet."""
        return self.own_frames(stream)

    def own_segments(self, stream: Stream, level: int = 0) -> list[Segment]:
        """Sealed files with visible rows, without the folders of other ranks."""
        found = self._shown.get((stream, level))
        if found is None:
            own = [s for s in self.catalog.segments if s.stream == stream and s.level == level]
            found = self._shown[stream, level] = [shown for segment in own if (shown := self._clipped(segment))]
        return found

    def _clipped(self, segment: Segment) -> Segment | None:
        attempt = self.attempt_of(segment.stream, segment.last_sequence)
        if attempt > self.history.last:
            return None
        limit = self.history.limit(attempt)
        # Scalars logged ahead of their step may belong to an earlier attempt.
        if segment.stream == "stats" and segment.first_step >= limit:
            return None
        return replace(segment, attempt=attempt, until=limit)

    def attempt_of(self, stream: Stream, sequence: int) -> int:
        """The attempt that a frame belongs to, whether visible or not."""
        return History(self.catalog.attempts).attempt_of(stream, sequence)

    def is_shown(self, attempt: int, step: int) -> bool:
        """Whether the data of an attempt at a step is visible."""
        if attempt <= self.history.last:
            return step < self.history.limit(attempt)
        return self.view is None  # an attempt that has recorded nothing else

    def last_sealed(self, stream: Stream, rank: int) -> int:
        """The sequence up to which a stream is in sealed files."""
        own = [s for s in self.catalog.segments if (s.stream, s.rank, s.level) == (stream, rank, 0)]
        return max((segment.last_sequence for segment in own), default=-1)

    def own_frames(self, stream: Stream) -> list[Frame]:
        """Visible frames that are not sealed yet, without the folders of other ranks."""
        found = self._live.get(stream)
        if found is None:
            found = [frame for log in self.logs.get(stream, []) for frame in self.shown_frames(log)]
            self._live[stream] = found
        return found

    def shown_frames(self, log: StreamLog, after: int = -1) -> list[Frame]:
        """Unsealed visible frames of one log after a sequence."""
        frames = log.frames(max(after, self.last_sealed(log.stream, log.rank)))
        return [shown for frame in frames if (shown := self._shown_part(log.stream, frame))]

    def _shown_part(self, stream: Stream, frame: Frame) -> Frame | None:
        attempt = self.attempt_of(stream, frame.sequence)
        if attempt > self.history.last:
            return None
        limit, record = self.history.limit(attempt), frame.record
        if isinstance(record, StatsRecord):
            return frame if record.step < limit else None
        is_shown = record.made_at < limit
        return frame if is_shown.all() else replace(frame, record=record.where(is_shown))

    def _lost(self, stream: Stream) -> list[str]:
        """Acknowledged frames that are neither in a log nor in a segment. An incomplete tail is not a loss."""
        rank = self.manifest.rank
        acknowledged = self.manifest.heartbeat.last_acknowledged(stream)
        covered = -1
        problems = []
        own = [s for s in self.catalog.segments if (s.stream, s.rank, s.level) == (stream, rank, 0)]
        spans = [(s.first_sequence, s.last_sequence) for s in own]
        for log in self.logs.get(stream, []):
            if log.rank == rank:
                spans += [(f.sequence, f.sequence) for f in log.frames(self.last_sealed(stream, rank))]
        for first, last in [*sorted(spans), (acknowledged + 1, acknowledged + 1)]:
            if first > covered + 1 and covered < acknowledged:
                lost = min(first - 1, acknowledged) - covered
                problems.append(
                    f"{lost} record{'s' if lost != 1 else ''} of {stream} (sequence {covered + 1} to {covered + lost}) "
                    "cannot be read: a log or the catalog is truncated, damaged or missing"
                )
            covered = max(covered, last)
        return problems

    def _nameless(self, stream: Stream) -> list[str]:
        """Report rows whose site or scalar is missing in the catalog, because they cannot be shown."""
        spoken_of = {
            number
            for s in self.own_segments(stream)
            for tile in s.tiles
            for number in (tile.first_site, tile.last_site)
        }
        ids = [
            frame.record.site_ids if isinstance(frame.record, StatsRecord) else frame.record.name_ids
            for frame in self.own_frames(stream)
        ]
        if ids:
            spoken_of.update(np.unique(np.concatenate(ids)).tolist())
        known = self.catalog.sites if stream == "stats" else self.catalog.scalar_names
        num_unknown = len(spoken_of - known.keys())
        if not num_unknown or self.catalog.error is not None:
            return []
        return [f"{CATALOG_FILE}: names of {stream} that are missing: {num_unknown}; their rows are not shown"]

    def last_step(self) -> int:
        """The last step with a row; -1 before the first."""
        steps = [self._last_step_in(segment) for stream in STREAMS for segment in self.segments_of(stream)]
        for stream in STREAMS:
            for frame in self.live_frames(stream):
                steps.append(frame.record.last_step)
        return max(steps, default=-1)

    def _last_step_in(self, segment: Segment) -> int:
        try:
            return self.segments.last_step(segment)
        except CorruptError as error:
            self.damage[segment.name] = str(error)
            return min(segment.last_step, segment.until - 1)

    def status(self) -> Status:
        return true_status(self.run, self.manifest, self._last_known_step())

    def _last_known_step(self) -> int:
        """The last known step of training; a heartbeat may be older than an attempt."""
        beat = self.manifest.heartbeat
        is_newest = beat.attempt == len(self.catalog.attempts) - 1
        return max(self.last_step(), beat.step) if is_newest and self.view is None else self.last_step()

    def verify(self) -> list[str]:
        """Read every sealed byte and describe each problem."""
        for segment in self.catalog.segments:
            try:
                self.segments.verify(segment)
            except CorruptError as error:
                self.damage[segment.name] = str(error)
        return [*self.problems, *self.damage.values()]

    def warnings(self) -> list[str]:
        """Describe everything that limits how far the recorded data can be trusted."""
        beat = self.manifest.heartbeat
        found = [*self.problems, *self.damage.values()]
        missing = [name for name in self.catalog.missing_files if name not in self.damage]
        if missing:
            more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            found.append(f"{missing[0]}{more}: missing. Restore from a backup; the rest of the run can be read")
        if not self.is_alive:
            if self.manifest.status == "running" and announced_ending(self.run, self.manifest) is not None:
                found.append("the process ended before everything was written: the last records may be missing")
            torn = [name for logs in self.logs.values() for log in logs for name in log.torn]
            found += [f"{name} ends in an incomplete record: the writer was stopped while writing it" for name in torn]
        found += loss_warnings(self.run, beat, is_live=self.is_held)
        if beat.degraded:
            found.append(f"recording was degraded: {beat.degraded}")
        return found


def file_signature(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file does; None if there is no file."""
    try:
        found = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
