"""The tables of a run as sources for export, read piece by piece, so that a run may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from sonde.run import Run
from sonde.schema.losses import logged_scalars
from sonde.schema.stats import STATS
from sonde.schema.window import Column
from sonde.show.plain_columns import plain_columns

TABLES: Final = ("stats", "scalars", "events", "system", "sites")
ROWS_AT_ONCE: Final = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """The scalars to export, and their shape."""

    patterns: Sequence[str] = ()
    """Globs of names; without any, the scalars that the user logged."""
    is_wide: bool = False
    """One row per step and one column per scalar, instead of one row per value."""

    def read(self, run: Run, steps: slice | None) -> pa.Table:
        names = list(self.patterns) or logged_scalars(run.scalar_names)
        is_exact = not self.patterns
        if self.is_wide:
            return widened(run.scalar_lines(names, steps=steps, exact=is_exact))
        return plain_columns(run.scalars(names, steps=steps, exact=is_exact))


LOGGED: Final = Scalars()


def widened(lines: Mapping[str, Column]) -> pa.Table:
    """One row per step, one column per name; null where nothing was logged. Of two values at a step, the last."""
    steps = np.unique(np.concatenate([own_steps for own_steps, _ in lines.values()])) if lines else np.empty(0)
    columns: dict[str, pa.Array] = {"step": pa.array(steps, pa.int64())}
    for name, (own_steps, values) in lines.items():
        place = np.searchsorted(steps, own_steps)
        column, is_missing = np.zeros(len(steps)), np.ones(len(steps), np.bool_)
        column[place], is_missing[place] = values, False
        label = "scalar/step" if name == "step" else name
        columns[label] = pa.array(column, mask=is_missing)
    return pa.table(columns)


@dataclass(frozen=True, slots=True)
class Source:
    """A table to export piece by piece; a series is never split between pieces."""

    name: str
    num_pieces: int
    read: Callable[[int], pa.Table]
    """Read the piece with this number."""

    def pieces(self) -> Iterator[pa.Table]:
        return (self.read(number) for number in range(self.num_pieces))


def sources(
    run: Run,
    tables: Sequence[str],
    *,
    series: Sequence[str] = ("*",),
    scalars: Scalars = LOGGED,
    steps: slice | None = None,
) -> list[Source]:
    """The requested tables; nothing is read yet. `series` chooses stats."""
    return [_source(run, table, series, scalars, steps) for table in tables]


def _source(run: Run, table: str, series: Sequence[str], scalars: Scalars, steps: slice | None) -> Source:
    if table == "scalars":
        return Source(table, 1, lambda _: scalars.read(run, steps))
    if table == "stats":
        patterns = _stat_patterns(run, series, steps)
        return Source(table, len(patterns), lambda number: _stats(run, patterns[number], steps))
    return Source(table, 1, lambda _: _small(run, table, steps))


def _stat_patterns(run: Run, series: Sequence[str], steps: slice | None) -> list[list[str]]:
    """Groups of patterns small enough to fit in memory; one empty group if there are none, for the header."""
    run.stats(list(series), steps=slice(0, 0))  # an unknown name fails before anything is written
    wanted: list[str] = []
    for pattern in series:
        kind, site, stat = (*pattern.split("/"), "*", "*")[:3]
        found = run.sites(f"{kind}/{site}")
        names = zip(found["kind"].to_pylist(), found["site"].to_pylist(), strict=True)
        wanted += [f"{one_kind}/{one_site}/{stat}" for one_kind, one_site in names]
    first, stop, _ = (steps or slice(None)).indices(run.last_step + 1)
    group = max(1, ROWS_AT_ONCE // (len(STATS) * max(stop - first, 1)))
    return [wanted[start : start + group] for start in range(0, len(wanted), group)] or [[]]


def _stats(run: Run, patterns: list[str], steps: slice | None) -> pa.Table:
    table = plain_columns(run.stats(patterns or ["*"], steps=steps if patterns else slice(0, 0)))
    # A site's name is used as a pattern and may match other sites as a glob; those are exported separately.
    asked = {tuple(pattern.split("/")[:2]) for pattern in patterns}
    pairs = zip(table["kind"].to_pylist(), table["site"].to_pylist(), strict=True)
    keep = np.fromiter((pair in asked for pair in pairs), np.bool_, table.num_rows)
    return table if keep.all() else table.filter(pa.array(keep))


def _small(run: Run, table: str, steps: slice | None) -> pa.Table:
    found: Any = {"events": run.events, "system": run.system, "sites": run.sites}[table]()
    if steps is not None and "step" in found.column_names:
        first, stop, stride = steps.indices(run.last_step + 1)
        step = found["step"].to_numpy()
        found = found.filter(pa.array((step >= first) & (step < stop) & ((step - first) % stride == 0)))
    return plain_columns(found)


def run_facts(run: Run) -> dict[str, Any]:
    """The description of the run that is stored in a file."""
    return {
        "id": run.id,
        "project": run.project,
        "name": run.name,
        "status": run.status,
        "reason": run.reason,
        "created": run.created.isoformat(),
        "last_step": run.last_step,
        "config": run.config,
        "tags": list(run.tags),
        "notes": run.notes,
        "git": run.git,
        "warnings": run.warnings,
    }
