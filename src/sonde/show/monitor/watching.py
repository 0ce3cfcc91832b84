"""The run that is shown and the list of all runs, read by a background thread that may be slow."""

from __future__ import annotations

import time
from typing import Final

from sonde.show.monitor.frame import Frame, RunLine
from sonde.show.monitor.reading import Reading, run_line
from sonde.show.monitor.target import Target

LIST_INTERVAL_S: Final = 3.0
"""Seconds between scans of the folder; a run that died is marked at the next scan."""


class WatchedRuns:
    """The runs of a target, and one of them in detail. Not thread-safe."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.reading: Reading | None = None
        self.chosen: str | None = None
        """The folder of the run that the user chose; if None, the newest running one is shown."""
        self.pattern = ("grad", "rms")
        self._listed: tuple[RunLine, ...] = ()
        self._listed_at = -LIST_INTERVAL_S

    def look(self) -> Frame:
        """Read new data and return the current frame."""
        self._list()
        self._pick()
        if self.reading is None:
            return Frame(run=None, problem=self.what_to_do())
        self.reading.show(*self.pattern)
        self.reading.look()
        return self.reading.frame(self._with_newest())

    def judge(self) -> Frame:
        """Run all rules on the run that is shown."""
        if self.reading is None:
            return self.look()
        self.reading.judge()
        return self.reading.frame(self._with_newest())

    def choose(self, path: str) -> None:
        """Show this run from now on."""
        self.chosen = path

    def kinds(self) -> list[str]:
        return [] if self.reading is None else self.reading.kinds()

    def what_to_do(self) -> str:
        where = self.target.only or self.target.folder
        return (
            f"No run in {where} yet. Record one:  sonde run train.py  or, in the training script,  "
            "with sonde.watch(model, optimizer): ..."
        )

    def _list(self) -> None:
        now = time.monotonic()
        if now - self._listed_at >= LIST_INTERVAL_S or self.reading is None:
            self._listed = tuple(run_line(run) for run in self.target.runs())
            self._listed_at = now

    def _pick(self) -> None:
        paths = {line.path: line for line in self._listed}
        wanted = self.chosen if self.chosen in paths else None
        if wanted is None:
            running = [line for line in self._listed if line.status == "running"]
            newest = next(iter(running or self._listed), None)
            current = None if self.reading is None else paths.get(str(self.reading.run.path))
            # Stay with a run that is still running when another one starts.
            wanted = current.path if current and current.status == "running" else newest.path if newest else None
        if wanted is None or (self.reading is not None and str(self.reading.run.path) == wanted):
            return
        run = next((run for run in self.target.runs() if str(run.path) == wanted), None)
        self.reading = None if run is None else Reading(run)

    def _with_newest(self) -> tuple[RunLine, ...]:
        """The list of runs, with the current state of the run that is shown."""
        if self.reading is None or self.reading.problem:
            return self._listed
        own = run_line(self.reading.run)
        return tuple(own if line.path == own.path else line for line in self._listed)
