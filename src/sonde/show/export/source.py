"""What can be exported: the tables of a run, piece by piece, so that a run larger than memory passes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from sonde.run import Run
from sonde.schema.stats import STATS
from sonde.show.plain_columns import plain_columns

TABLES: Final = ("stats", "scalars", "events", "system", "sites")
ROWS_AT_ONCE: Final = 4_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """One table to export, piece by piece; a series is never split over two."""

    name: str
    num_pieces: int
    read: Callable[[int], pa.Table]
    """The piece of a number."""

    def pieces(self) -> Iterator[pa.Table]:
        return (self.read(number) for number in range(self.num_pieces))


def sources(
    run: Run, tables: Sequence[str], *, series: Sequence[str] = ("*",), steps: slice | None = None
) -> list[Source]:
    """The tables asked for, none of them read yet."""
    return [_source(run, table, series, steps) for table in tables]


def _source(run: Run, table: str, series: Sequence[str], steps: slice | None) -> Source:
    if table == "stats":
        patterns = _stat_patterns(run, series, steps)
        return Source(table, len(patterns), lambda number: _stats(run, patterns[number], steps))
    return Source(table, 1, lambda _: _small(run, table, steps))


def _stat_patterns(run: Run, series: Sequence[str], steps: slice | None) -> list[list[str]]:
    """Patterns of few enough sites to be in memory at once; one empty group where there are none, for the header."""
    run.stats(list(series), steps=slice(0, 0))  # an unknown name is answered before anything is written
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
    # A site's name is its own pattern, and may as a glob match other sites: those have their own turn.
    asked = {tuple(pattern.split("/")[:2]) for pattern in patterns}
    pairs = zip(table["kind"].to_pylist(), table["site"].to_pylist(), strict=True)
    keep = np.fromiter((pair in asked for pair in pairs), np.bool_, table.num_rows)
    return table if keep.all() else table.filter(pa.array(keep))


def _small(run: Run, table: str, steps: slice | None) -> pa.Table:
    if table == "scalars":
        return plain_columns(run.scalars(steps=steps))
    found: Any = {"events": run.events, "system": run.system, "sites": run.sites}[table]()
    if steps is not None and "step" in found.column_names:
        first, stop, stride = steps.indices(run.last_step + 1)
        step = found["step"].to_numpy()
        found = found.filter(pa.array((step >= first) & (step < stop) & ((step - first) % stride == 0)))
    return plain_columns(found)


def run_facts(run: Run) -> dict[str, Any]:
    """What a file says about the run it came from."""
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
