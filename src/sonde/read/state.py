"""What a run folder holds at one moment: manifest, live frames and catalog, read in an order that cannot miss a row."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from sonde.errors import CorruptError
from sonde.read.catalog import Catalog, Segment, read_catalog
from sonde.read.folder import read_manifest
from sonde.read.log import StreamLog, list_folder
from sonde.read.manifest import Manifest
from sonde.read.segments import SegmentReader
from sonde.read.status import Status, is_alive, is_locked, true_status
from sonde.schema.layout import CATALOG_FILE, RUN_FILE, STREAMS, Stream
from sonde.schema.records import Frame, ScalarsRecord, StatsRecord

_RANK: Final = re.compile(r"rank-\d{4,8}")


@dataclass(slots=True)
class RunState:
    """Refreshed before each question; a run that does not change is not read twice."""

    run: Path
    manifest: Manifest
    catalog: Catalog = field(default_factory=Catalog)
    logs: dict[Stream, list[StreamLog]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What was found wrong with the folder as a whole; damage found while reading is added by the readers."""
    damage: dict[str, str] = field(default_factory=dict)
    """Damage found while reading series, by file."""
    segments: SegmentReader = field(init=False)
    _signature: object = None

    def __post_init__(self) -> None:
        self.segments = SegmentReader(self.run)

    def refresh(self) -> None:
        """Manifest first, logs next, catalog last: rows sealed in between are then in the log that was read or in the
        catalog, and what the manifest calls acknowledged is in one of them."""
        signature = self._signature_now()
        if signature == self._signature:
            return
        for _ in range(3):
            self.manifest = read_manifest(self.run)
            self._read_logs()
            self._read_catalog()
            # A log cut while it was being read looks damaged until it is read again.
            if not self.problems or not self.is_held:
                break
        self._signature = signature

    def _signature_now(self) -> object:
        files = [RUN_FILE, CATALOG_FILE, f"{CATALOG_FILE}-wal"]
        for stream in STREAMS:
            for folder in list_folder(self.run, stream):
                names = list_folder(self.run, stream, folder)
                files.extend(f"{stream}/{folder}/{name}" for name in names if name.endswith(".log"))
        return [(file, _file_signature(self.run / file)) for file in files]

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
        except CorruptError as error:
            self.catalog = Catalog(problems=(str(error),), error=error)
        self.problems.extend(self.catalog.problems)
        for stream in STREAMS:
            self.problems.extend(self._lost(stream))
            self.problems.extend(self._nameless(stream))

    @property
    def is_alive(self) -> bool:
        return self.manifest.status == "running" and is_alive(self.run, self.manifest)

    @property
    def is_held(self) -> bool:
        """Whether a writer may still touch the files: it seals for a moment after it has said goodbye."""
        return is_locked(self.run) is not False

    def segments_of(self, stream: Stream, level: int = 0) -> list[Segment]:
        return [segment for segment in self.catalog.segments if segment.stream == stream and segment.level == level]

    def last_sealed(self, stream: Stream, rank: int) -> int:
        """The sequence up to which a stream is in sealed files."""
        return max((s.last_sequence for s in self.segments_of(stream) if s.rank == rank), default=-1)

    def live_frames(self, stream: Stream) -> list[Frame]:
        """Frames that are not sealed yet, of all ranks."""
        return [frame for log in self.logs.get(stream, []) for frame in log.frames(self.last_sealed(stream, log.rank))]

    def _lost(self, stream: Stream) -> list[str]:
        """Acknowledged frames that are neither in a log nor in a segment. A torn tail behind them is no loss."""
        rank = self.manifest.rank
        acknowledged = self.manifest.heartbeat.last_acknowledged(stream)
        covered = -1
        problems = []
        spans = [(s.first_sequence, s.last_sequence) for s in self.segments_of(stream) if s.rank == rank]
        for log in self.logs.get(stream, []):
            if log.rank == rank:
                spans += [(f.sequence, f.sequence) for f in log.frames(self.last_sealed(stream, rank))]
        for first, last in [*sorted(spans), (acknowledged + 1, acknowledged + 1)]:
            if first > covered + 1 and covered < acknowledged:
                lost = min(first - 1, acknowledged) - covered
                problems.append(
                    f"{stream}: {lost} acknowledged record{'s' if lost != 1 else ''} (sequence {covered + 1} to "
                    f"{covered + lost}) can not be read: a log or the catalog was cut or damaged"
                )
            covered = max(covered, last)
        return problems

    def _nameless(self, stream: Stream) -> list[str]:
        """Rows whose site or scalar the catalog does not know: they cannot be shown, and that must be said."""
        spoken_of = {
            number for s in self.segments_of(stream) for tile in s.tiles for number in (tile.first_site, tile.last_site)
        }
        ids = [
            frame.record.site_ids if isinstance(frame.record, StatsRecord) else frame.record.name_ids
            for frame in self.live_frames(stream)
        ]
        if ids:
            spoken_of.update(np.unique(np.concatenate(ids)).tolist())
        known = self.catalog.sites if stream == "stats" else self.catalog.scalar_names
        num_unknown = len(spoken_of - known.keys())
        if not num_unknown or self.catalog.error is not None:
            return []
        return [
            f"{CATALOG_FILE}: {num_unknown} names that rows of {stream} belong to are missing; these rows are not shown"
        ]

    def last_step(self) -> int:
        """The last step with a row; -1 before the first."""
        steps = [segment.last_step for segment in self.catalog.segments]
        for stream in STREAMS:
            for frame in self.live_frames(stream):
                steps.append(last_step_of(frame.record))
        return max(steps, default=-1)

    def status(self) -> Status:
        return true_status(self.run, self.manifest, max(self.last_step(), self.manifest.heartbeat.step))

    def verify(self) -> list[str]:
        """Everything that is not as it was written, every sealed byte looked at."""
        for segment in self.catalog.segments:
            try:
                self.segments.verify(segment)
            except CorruptError as error:
                self.damage[segment.name] = str(error)
        return [*self.problems, *self.damage.values()]

    def warnings(self) -> list[str]:
        """Everything a viewer should know before trusting a picture of this run, in words."""
        beat = self.manifest.heartbeat
        found = [*self.problems, *self.damage.values()]
        if not self.is_alive:
            torn = [name for logs in self.logs.values() for log in logs for name in log.torn]
            found += [f"{name} ends in an unfinished record: the writer was stopped while writing it" for name in torn]
        for stream, count in beat.dropped.items():
            if count:
                found.append(f"{count:,} records of {stream} were dropped: the disk was too slow")
        if beat.degraded:
            found.append(f"recording was degraded: {beat.degraded}")
        return found


def last_step_of(record: StatsRecord | ScalarsRecord) -> int:
    if isinstance(record, StatsRecord):
        return record.step
    return int(record.steps.max()) if len(record.steps) else -1


def _file_signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def open_state(run: Path) -> RunState:
    state = RunState(run, read_manifest(run))
    state.refresh()
    return state
