"""The viewing side, composed: `open` a run, list `runs`, `compare` two. Composes `read`; computes nothing itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from sonde.errors import RunError, SondeError
from sonde.read.folder import default_dir, find_run, run_folders
from sonde.read.manifest import Manifest
from sonde.read.scalars import read_scalars
from sonde.read.state import RunState, open_state
from sonde.read.stats import read_stats
from sonde.read.steps import Steps, parse_steps
from sonde.read.tables import event_table, site_table, system_table
from sonde.schema.layout import RunStatus


def open(path: str | os.PathLike[str] = "latest", *, dir: str | os.PathLike[str] | None = None) -> Run:
    """Open a run by folder, id, "project/name", a unique prefix, or "latest".

    run = sonde.open("runs/latest")
    run.stats("grad/*/norm")
    """
    return Run(find_run(path, None if dir is None else Path(dir)))


def runs(dir: str | os.PathLike[str] | None = None, project: str | None = None) -> list[Run]:
    """Every run in a folder of runs, newest first. Folders that cannot be opened are left out; see `broken_runs`."""
    found = [run for run in map(_try_open, run_folders(_dir(dir))) if isinstance(run, Run)]
    wanted = [run for run in found if project is None or run.project == project]
    return sorted(wanted, key=lambda run: (run.created, run.path.name), reverse=True)


def broken_runs(dir: str | os.PathLike[str] | None = None) -> dict[Path, SondeError]:
    """Run folders that cannot be opened, and why."""
    tried = {folder: _try_open(folder) for folder in run_folders(_dir(dir))}
    return {folder: result for folder, result in tried.items() if isinstance(result, SondeError)}


def _dir(dir: str | os.PathLike[str] | None) -> Path:
    return default_dir() if dir is None else Path(dir)


def _try_open(folder: Path) -> Run | SondeError:
    try:
        return Run(folder)
    except RunError as error:
        return error


class Run:
    """A recorded run. Every answer is as new as the files; nothing is ever written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()
        self._state = open_state(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, last_step={self.last_step})"

    @property
    def _now(self) -> RunState:
        self._state.refresh()
        return self._state

    @property
    def manifest(self) -> Manifest:
        """All of run.json."""
        return self._now.manifest

    @property
    def id(self) -> str:
        return self._state.manifest.id

    @property
    def name(self) -> str:
        return self._state.manifest.name

    @property
    def project(self) -> str:
        return self._state.manifest.project

    @property
    def status(self) -> RunStatus:
        """`running`, `finished`, `crashed` or `interrupted`: the truth, even after kill -9."""
        return self._now.status().status

    @property
    def reason(self) -> str:
        """Why the run ended, in words; empty when it finished by itself or still runs."""
        return self._now.status().reason

    @property
    def config(self) -> Mapping[str, Any]:
        return self._state.manifest.config

    @property
    def tags(self) -> tuple[str, ...]:
        return self._state.manifest.tags

    @property
    def notes(self) -> str:
        return self._state.manifest.notes

    @property
    def environment(self) -> Mapping[str, Any]:
        return self._now.manifest.environment

    @property
    def git(self) -> Mapping[str, Any] | None:
        return self._now.manifest.git

    @property
    def created(self) -> datetime:
        """When the run began, in UTC."""
        try:
            return datetime.fromtimestamp(self._state.manifest.created_time, UTC)
        except (OverflowError, OSError, ValueError):  # a year that no calendar has
            return datetime.fromtimestamp(0, UTC)

    @property
    def last_step(self) -> int:
        """The last recorded step; -1 before the first."""
        return self._now.last_step()

    @property
    def warnings(self) -> list[str]:
        """Damage, unfinished tails, dropped rows: what to know before trusting a picture of this run."""
        return self._now.warnings()

    def stats(self, pattern: str | Sequence[str], *, steps: Steps = None) -> pa.Table:
        """Long table (step, kind, site, stat, value) of the series that patterns name.

            run.stats("grad/*/norm", steps=slice(-100, None)).to_pandas()

        Damaged files are left out and named in `warnings`; when nothing else holds what was asked, CorruptError.
        """
        state = self._now
        return read_stats(state, pattern, parse_steps(steps, state.last_step()))

    def scalars(self, pattern: str | Sequence[str] = "*", *, steps: Steps = None) -> pa.Table:
        """Table (step, name, value, time) of logged numbers, in order of (name, step)."""
        state = self._now
        return read_scalars(state, pattern, parse_steps(steps, state.last_step()))

    def sites(self, pattern: str = "*") -> pa.Table:
        """Table (kind, site, shape, dtype, owner, module_type, aliases) of the places that were measured."""
        return site_table(self._now, pattern)

    def events(self) -> pa.Table:
        """Table (time, step, type, severity, message, details) of what happened once."""
        return event_table(self.path, is_live=self._now.is_alive)

    def system(self) -> pa.Table:
        """Table (time, step, name, value) of readings of the machine."""
        return system_table(self.path, is_live=self._now.is_alive)

    def coverage(self) -> Mapping[str, Any]:
        """What the recorder said about the sites it could and could not see; empty when it said nothing."""
        coverage = self._now.manifest.facts.get("coverage")
        return coverage if isinstance(coverage, Mapping) else {}
