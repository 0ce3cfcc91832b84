"""The visible snapshots of a run: for each step, the one of the last attempt that covers it.

A snapshot is complete by itself, so the mark that hides the last step of a killed process does not hide its snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sonde.errors import CorruptError, RunError
from sonde.read.run.catalog import read_attempts, read_snapshot_rows
from sonde.read.run.state import file_signature
from sonde.read.run.status import is_locked
from sonde.read.tensors.readers import TensorStore
from sonde.schema.attempts import History
from sonde.schema.layout import CATALOG_FILE
from sonde.schema.snapshots.document import SnapshotReader
from sonde.schema.snapshots.tensors import SnapshotKey


class Source(Protocol):
    """A source of snapshots, with one place per attempt."""

    @property
    def name(self) -> str:
        """The folder or URL, for messages."""
        ...

    def attempts(self) -> list[int]:
        """The places with a snapshot."""
        ...

    def store(self, attempt: int) -> TensorStore:
        """The snapshots of one place."""
        ...


def is_shown(history: History, view: int | None, attempt: int, step: int) -> bool:
    """Whether the snapshot that an attempt took of a step is visible. `history` ends with the selected attempt;
    `view` is None for the last one."""
    if attempt > history.last:
        # Earlier versions did not store an attempt that recorded nothing else.
        return view is None or attempt <= view
    return step < history.abandoned_from(attempt)


@dataclass(frozen=True, slots=True)
class _Known:
    """Attempts and snapshots according to the catalog."""

    history: History = field(default_factory=History)
    attempts: dict[SnapshotKey, int] = field(default_factory=dict)
    """The attempt of each snapshot, by its place. Earlier versions stored those of all attempts in the first place."""

    def attempt_of(self, place: SnapshotKey) -> int:
        return max(place.attempt, self.attempts.get(place, place.attempt))


class SnapshotView(TensorStore):
    """A store of the visible snapshots. Later snapshots and attempts are found, too."""

    def __init__(self, run: Path, source: Source, *, attempt: int | None = None) -> None:
        self.run, self._source, self._view = run, source, attempt
        self._signature: object = None
        self._known = _Known()
        self._shown: dict[int, tuple[SnapshotKey, int]] = {}
        self._stores: dict[int, TensorStore] = {}

    @property
    def steps(self) -> list[int]:
        return sorted(self._look())

    def reader(self, step: int) -> SnapshotReader:
        return self._store_at(self.place(step).attempt).reader(step)

    def place(self, step: int) -> SnapshotKey:
        return self._find(step)[0]

    def attempt(self, step: int) -> int:
        return self._find(step)[1]

    def hidden(self, step: int) -> list[int]:
        self._look()
        return sorted({attempt for place, attempt in self._all() if place.step == step})

    # ---------------------------------------------------------------------------------------------------------- inside

    def _find(self, step: int) -> tuple[SnapshotKey, int]:
        found = self._shown.get(step) if self._signature == self._signature_now() else None
        if found is None and (found := self._look().get(step)) is None:
            hidden = "".join(f" Attempt {attempt} has one, which is hidden." for attempt in self.hidden(step))
            raise RunError(f"{self._source.name} has no snapshot of step {step}. {known_steps(self.steps)}{hidden}")
        return found

    def _store_at(self, attempt: int) -> TensorStore:
        if attempt not in self._stores:
            self._stores[attempt] = self._source.store(attempt)
        return self._stores[attempt]

    def _look(self) -> dict[int, tuple[SnapshotKey, int]]:
        """The place of the snapshot of each step, and its attempt."""
        signature = self._signature_now()
        if signature != self._signature or not self._shown:
            self._known = self._read_catalog()
        every = sorted(self._all(), key=lambda found: found[1])
        view = self._viewed([attempt for _, attempt in every])
        history = self._known.history if view is None else self._known.history.until(view)
        shown = [(place, attempt) for place, attempt in every if is_shown(history, view, attempt, place.step)]
        self._shown = {place.step: (place, attempt) for place, attempt in shown}
        self._signature = signature
        return self._shown

    def _viewed(self, attempts: list[int]) -> int | None:
        """The selected attempt, None for the last. `attempts` are those of the existing snapshots."""
        return self._view

    def _all(self) -> Iterator[tuple[SnapshotKey, int]]:
        for attempt in self._source.attempts():
            for step in self._store_at(attempt).steps:
                place = SnapshotKey(attempt, step)
                yield place, self._known.attempt_of(place)

    def _read_catalog(self) -> _Known:
        is_live = is_locked(self.run) is not False
        try:
            attempts = read_attempts(self.run, is_live=is_live)
            rows = read_snapshot_rows(self.run, is_live=is_live)
        except CorruptError:
            if self._source.attempts() not in ([], [0]):
                raise
            return _Known()  # with a single attempt, tensors do not need the catalog
        return _Known(History(attempts), {row.place: row.attempt for row in rows})

    def _signature_now(self) -> object:
        return [file_signature(self.run / f"{CATALOG_FILE}{suffix}") for suffix in ("", "-wal")]


def known_steps(steps: list[int]) -> str:
    """The steps with a snapshot, in words."""
    if not steps:
        return "It has no snapshots. Take some:  sonde.watch(model, snapshots=sonde.every(500))"
    shown = ", ".join(map(str, steps[:8]))
    return f"Snapshots exist at steps {shown}{', …' if len(steps) > 8 else ''}."
