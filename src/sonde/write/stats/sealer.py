"""Decides when logs become segments: logs that are large enough are sealed, and a failure is retried later.

A failure costs only compactness: the frames stay in the log, where readers find them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from sonde.schema.layout import Stream
from sonde.schema.records import Severity
from sonde.schema.words import MIB, in_words
from sonde.write.options import WriterOptions
from sonde.write.stats.attempts import Attempts
from sonde.write.stats.catalog import Committer, Row, Segment, attempt_row, segment_row
from sonde.write.stats.pyramid import Pyramid
from sonde.write.stats.stream import Sealed, StreamWriter
from sonde.write.stats.table import StatsTable

_FIRST_BACKOFF_S: Final = 0.5
_LAST_BACKOFF_S: Final = 60.0
# Scalars are few: a segment of 1,024 steps would hold a few kilobytes and a long run thousands of files.
_SCALAR_ROWS_PER_SEAL_STEP: Final = 64

Remember = Callable[[str, str, Severity], None]
"""Records an event: its type, message and severity."""


class Sealer:
    """Used in the writer thread only, and never while older frames wait for the disk."""

    def __init__(
        self,
        run: Path,
        options: WriterOptions,
        catalog: Committer,
        streams: Mapping[Stream, StreamWriter],
        segments: list[Segment],
        attempts: Attempts,
        *,
        remember: Remember,
        tell: Callable[[str], None],
    ) -> None:
        self._options, self._catalog, self._streams, self._segments = options, catalog, streams, segments
        self._attempts = attempts
        self._remember, self._tell = remember, tell
        self._pyramid = Pyramid(
            run, options.rank, segments, lambda sequence: attempts.history.attempt_of("stats", sequence)
        )
        self._has_pyramid_failed = False
        self._backoff_s = _FIRST_BACKOFF_S
        self._next_try = 0.0
        self.num_scalar_rows = 0
        """Logged numbers that are not sealed yet."""
        self.error = ""

    def seal_due(self, now: float, *, force: bool = False) -> None:
        """Seal everything that is large enough, or everything. Never raises."""
        if now < self._next_try and not force:
            return
        try:
            for name, stream in self._streams.items():
                if stream.is_recovered or self._is_due(name, stream) or (force and stream.num_frames):
                    self._seal(name, stream)
        except Exception as error:  # noqa: BLE001  nothing may end the writer thread; failures are reported and retried
            self._next_try = now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _LAST_BACKOFF_S)
            self.error = f"sealing failed: {in_words(error)}"
            self._tell(self.error)
        else:
            self.error, self._backoff_s = "", _FIRST_BACKOFF_S

    def _is_due(self, name: Stream, stream: StreamWriter) -> bool:
        if name == "scalars" and not self.num_scalar_rows:
            return False
        if stream.num_bytes >= self._options.seal_mib * MIB:
            return True
        if name == "stats":
            return stream.num_frames >= self._options.seal_steps
        return self.num_scalar_rows >= self._options.seal_steps * _SCALAR_ROWS_PER_SEAL_STEP

    def _seal(self, name: Stream, stream: StreamWriter) -> None:
        """One segment for each attempt that has frames in the log."""
        if stream.is_sealed:  # frames found in the log are already in a segment, or were never complete
            stream.cut()
        while not stream.is_sealed and self._seal_one(name, stream):
            pass
        stream.is_recovered = False  # frames without rows stay in the log
        if name == "scalars":
            self.num_scalar_rows = 0

    def _seal_one(self, name: Stream, stream: StreamWriter) -> bool:
        """Segment, catalog, log: in this order each crash leaves a run that reads the same."""
        sealed = stream.seal(self._segments[-1].id + 1 if self._segments else 1, self._attempts.history)
        if sealed is None:
            return False
        self._catalog.commit([segment_row(sealed.segment), *self._mark_rows(sealed)])
        self._segments.append(sealed.segment)
        stream.mark_sealed(sealed.segment)
        if sealed.num_lost:
            lost = f"{sealed.num_lost} records of {name} were written but can no longer be read"
            self._remember("lost", lost, "critical")
        if stream.is_sealed:
            stream.cut()
        if sealed.table is not None:
            self._grow(sealed.segment, sealed.table)
        return True

    def _mark_rows(self, sealed: Sealed) -> list[Row]:
        """Called when the log is about to be cut, and the mark with it."""
        return [] if sealed.mark is None else [attempt_row(self._attempts.set_mark(sealed.attempt, sealed.mark))]

    def _grow(self, segment: Segment, table: StatsTable) -> None:
        """The pyramid is built from sealed segments and can be built later: a failure must not stop the sealing."""
        try:
            self._pyramid.grow(self._catalog, segment, table)
        except Exception as error:  # noqa: BLE001  as above
            if not self._has_pyramid_failed:
                self._has_pyramid_failed = True
                self._remember(
                    "pyramid_failed",
                    f"the overview of merged steps could not be extended: {in_words(error)}",
                    "warning",
                )
