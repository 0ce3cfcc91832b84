"""The other ranks of a distributed job: how they find the run of the first rank, and the log that each writes into it.

The first rank leaves a note next to the runs, named after the job, with the run's folder; the others look for it. No
collective is ever used: a rank that finds nothing stays silent.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.schema.layout import RANKS_FOLDER, rank_log
from sonde.schema.records import Event, check_document, sign_document, to_json
from sonde.write.durable import make_folder, sync_folder

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
STALE_S: Final = 24 * 3600.0
_MAX_READ: Final = 1 << 20


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    group = _process_group(environment)
    return _number(environment.get("WORLD_SIZE"), 1) if group is None else int(group.get_world_size())


def rank(environment: Mapping[str, str] = os.environ) -> int:
    group = _process_group(environment)
    return _number(environment.get("RANK"), 0) if group is None else int(group.get_rank())


def _process_group(environment: Mapping[str, str]) -> Any:
    """torch.distributed, if this process has joined a group: not every launcher sets RANK. Lightning does not."""
    group = sys.modules.get("torch.distributed") if environment is os.environ else None
    return group if group is not None and group.is_available() and group.is_initialized() else None


def job_name(environment: Mapping[str, str] = os.environ) -> str:
    """The same in all processes of a job, and different after a restart."""
    parts = [environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    parts.append(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return _UNSAFE.sub("_", "-".join(part for part in parts if part))


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() else default


def _note(dir: Path) -> Path:
    return dir / f".job-{job_name()}.json"


@dataclass(frozen=True, slots=True)
class Announced:
    """The run of the first rank of a job, and the step it starts with."""

    run: Path
    step: int


@dataclass(frozen=True, slots=True)
class Start:
    """The step at which a rank started or returned to: it attributes events to an attempt of the first rank."""

    time: float
    first_step: int | None
    """None: the step of the first rank."""


def announce(dir: Path, run: Path, *, step: int = 0) -> Path:
    """Publish where this job records. The note is removed when the run ends."""
    note = _note(dir)
    draft = note.with_suffix(".tmp")
    draft.write_text(to_json({"run": str(run.resolve()), "time": time.time(), "step": step}))
    draft.replace(note)
    return note


def find_announced(dir: Path, *, since: float) -> Announced | None:
    """The folder that the first rank records to, if it has published it since this job started."""
    try:
        found = json.loads(_note(dir).read_text())
        run, said, step = Path(found["run"]), float(found["time"]), int(found.get("step", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Announced(run, step) if said > since - STALE_S and run.is_dir() else None


class RankLog:
    """Events of one rank, one signed line each. Opened by the first event: a rank without events leaves no file."""

    def __init__(self, run: Path, number: int, first_step: int = 0) -> None:
        self.path, self.number, self.first_step = rank_log(run, number), number, first_step

    def write(self, event: Event, start: Start) -> None:
        """Until it returns to a step, a rank counts from 0: only the first rank knows where a resumed run continues."""
        make_folder(self.path.parent)
        is_new = not self.path.exists()
        step = event.step + (self.first_step if start.first_step is None else 0)
        message = event.message.replace(f"at step {event.step},", f"at step {step},", 1)
        row = {
            "time": event.time,
            "step": step,
            "type": event.type,
            "severity": event.severity,
            "message": f"rank {self.number}: {message}",
            "details": {**event.details, "rank": self.number},
            "attempt_time": start.time,
            "attempt_step": self.first_step if start.first_step is None else start.first_step,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(sign_document(to_json(row)))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self.path.parent)


class RankEvents:
    """The events that the other ranks have written since the last call, read by the first rank while it trains."""

    def __init__(self, run: Path) -> None:
        self._folder = run / RANKS_FOLDER
        self._num_read: dict[Path, int] = {}

    def __call__(self) -> list[Event]:
        if world_size() == 1:
            return []
        return [event for path in sorted(self._folder.glob("rank-*.jsonl")) for event in self._new(path)]

    def _new(self, path: Path) -> list[Event]:
        try:
            with path.open("rb") as file:
                file.seek(self._num_read.get(path, 0))
                lines = file.read(_MAX_READ).splitlines(keepends=True)
        except OSError:  # removed, or on a file system that does not respond
            return []
        complete = [line for line in lines if line.endswith(b"\n")]
        self._num_read[path] = self._num_read.get(path, 0) + sum(map(len, complete))
        return [event for line in complete if (event := _event(line)) is not None]


def _event(line: bytes) -> Event | None:
    try:
        row = json.loads(line) if check_document(line) else {}
        return Event(**{name: row[name] for name in Event.__dataclass_fields__})
    except (ValueError, KeyError, TypeError):
        return None
