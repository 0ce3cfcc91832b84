"""The series that rules need from a running run, in bounded memory: its first steps, newest steps and a thinned middle.

Records arrive in batches and become columns of stats, many steps and sites at a time. The resulting `Window` looks
like the one that is later read from disk. No I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.block import Block
from sonde.schema.joined import JOINED
from sonde.schema.names import Series, inspected_series, matches, matches_stat, split_pattern
from sonde.schema.records import ScalarsRecord, Site, StatsRecord, SystemSample
from sonde.schema.sketch import GRAD_MOMENT, GRAD_SQ_OVER_V, GRAD_UPDATE, HIST_N, NUM_BINS, Array
from sonde.schema.stats import STATS
from sonde.schema.window import Column, Window

_PLANS: Final = 64
"""Maximum number of site selections to remember; models with routed experts have a new one at every step."""
# Stats that exist only where the optimizer pass has computed the sum they are derived from.
_PAIRED: Final = {
    "grad_update_dot": GRAD_UPDATE,
    "grad_moment_dot": GRAD_MOMENT,
    "second_moment_lag": GRAD_SQ_OVER_V,
    "grad_cosine": GRAD_UPDATE,
    "moment_cosine": GRAD_MOMENT,
}
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Part:
    """One stat of one kind: the rows of a record that it is computed from, and their sites."""

    kind: str
    stat: str
    rows: Indices
    partners: tuple[Indices, ...]
    ids: tuple[int, ...]


class Rolling:
    """Columns of stats and scalars, filled by records and read as a window."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(split_pattern(pattern) for pattern in patterns)
        self.sites: dict[int, Site] = {}
        self.scalar_names: dict[int, str] = {}
        self._blocks: dict[tuple[str, str], Block[int]] = {}
        self._scalars: Block[str] = Block()
        self._plans: dict[bytes, list[_Part]] = {}
        self._asked = lru_cache(maxsize=64)(self._asked_of)
        self._joined = lru_cache(maxsize=256)(self._joined_of)

    # --------------------------------------------------------------------------------------------------- adding records

    def add(self, records: Sequence[StatsRecord | ScalarsRecord | SystemSample]) -> None:
        """Add records, in the order in which they were made."""
        groups: dict[bytes, list[StatsRecord]] = {}
        scalars = []
        for record in records:
            if isinstance(record, StatsRecord):
                # With the number of sites: without it, [0, 1] + [] and [0] + [1] would be one layout.
                layout = b"%d " % len(record.site_ids) + record.site_ids.tobytes() + record.hist_index.tobytes()
                groups.setdefault(layout, []).append(record)
            elif isinstance(record, ScalarsRecord):
                scalars.append(record)
            else:
                self._add_system(record)
        for layout, alike in groups.items():
            self._add_stats(layout, alike)
        if scalars:
            self._add_scalars(scalars)

    def _add_stats(self, layout: bytes, records: list[StatsRecord]) -> None:
        parts = self._plan(layout, records[0])
        steps = np.array([record.step for record in records], np.int64)
        rows = np.stack([record.rows for record in records])
        hist = self._hist(records) if any(_needs_hist(part.stat) for part in parts) else None
        for part in parts:
            values, seen = _evaluate(part, rows, hist)
            block = self._blocks.setdefault((part.kind, part.stat), Block())
            block.put(steps, part.ids, values, seen)

    @staticmethod
    def _hist(records: list[StatsRecord]) -> Array:
        """Histograms of all rows; zeros where none was recorded."""
        hist = np.zeros((len(records), len(records[0].site_ids), NUM_BINS))
        for place, record in zip(hist, records, strict=True):
            place[record.hist_index] = record.hist
        return hist

    def _add_scalars(self, records: list[ScalarsRecord]) -> None:
        names, steps, times, values = (
            np.concatenate([getattr(record, column) for record in records])
            for column in ("name_ids", "steps", "times", "values")
        )
        unique, column = np.unique(steps, return_inverse=True)
        ids, row = np.unique(names, return_inverse=True)
        grid, seen = np.zeros((len(unique), len(ids) + 1)), np.zeros((len(unique), len(ids) + 1), np.bool_)
        grid[column, row] = values  # the last value of a step counts
        seen[column, row] = True
        grid[:, -1] = -np.inf
        np.maximum.at(grid[:, -1], column, times)
        seen[:, -1] = True
        known = [self.scalar_names.get(int(id), "") for id in ids]
        self._scalars.put(unique, (*known, "clock"), grid, seen)

    def _add_system(self, sample: SystemSample) -> None:
        names = tuple(f"system/{name}" for name in sample.values)
        self._scalars.put(np.array([sample.step], np.int64), names, np.array([list(sample.values.values())]), None)

    def forget(self, step: int) -> None:
        """Drop this step and all later ones, because training has returned to it."""
        for block in self._blocks.values():
            block.forget(step)
        self._scalars.forget(step)

    # ------------------------------------------------------------------------------------------------------- the window

    def window(self, facts: Mapping[str, Any]) -> Window:
        """Everything recorded so far, as the window that rules read."""
        series: dict[Series, Column] = {}
        order = {id: place for place, id in enumerate(self.sites)}
        for (kind, stat), block in self._blocks.items():
            for id, column in sorted(block.columns(), key=lambda item: order.get(item[0], 0)):
                if id in self.sites:
                    series[Series(kind, self.sites[id].name, stat)] = column
        scalars: dict[str, Column] = {}
        for name, column in self._scalars.columns():
            inspected = inspected_series(name)
            if inspected is not None:
                series[inspected] = column
            elif name:
                scalars[name] = column
        return Window(series, scalars, facts)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._blocks.values()) + self._scalars.num_bytes

    # --------------------------------------------------------------------------------------------------------- planning

    def _plan(self, layout: bytes, record: StatsRecord) -> list[_Part]:
        known = self._plans.get(layout)
        if known is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            known = self._plans[layout] = self._make_plan(record)
        return known

    def _make_plan(self, record: StatsRecord) -> list[_Part]:
        row_of = {int(id): row for row, id in enumerate(record.site_ids)}
        by_name = {(self.sites[id].kind, self.sites[id].name): id for id in row_of if id in self.sites}
        with_hist = {int(record.site_ids[row]) for row in record.hist_index}
        wanted: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for (kind, name), id in by_name.items():
            for stat in self._stats_of(kind, name):
                partners = [by_name.get((k, name + suffix)) for k, suffix in _partners(stat)]
                if None in partners or (_needs_hist(stat) and id not in with_hist):
                    continue
                wanted.setdefault((kind, stat), []).append((id, *(p for p in partners if p is not None)))
        parts = []
        for (kind, stat), sites in wanted.items():
            rows = np.array([[row_of[id] for id in group] for group in sites], np.intp)
            own, partner_rows = rows[:, 0], tuple(rows[:, i] for i in range(1, rows.shape[1]))
            parts.append(_Part(kind, stat, own, partner_rows, tuple(group[0] for group in sites)))
        return parts

    def _stats_of(self, kind: str, name: str) -> tuple[str, ...]:
        """The stats that some pattern asks for, in the order of the patterns."""
        return self._joined(kind, tuple(site == "*" or matches(site, name) for site, _ in self._asked(kind)))

    def _joined_of(self, kind: str, is_asked: tuple[bool, ...]) -> tuple[str, ...]:
        asked = compress(self._asked(kind), is_asked)
        return tuple(dict.fromkeys(stat for _, stats in asked for stat in stats))

    def _asked_of(self, kind: str) -> list[tuple[str, list[str]]]:
        """For each pattern that asks for a kind: its sites, a glob, and its stats."""
        known = (*STATS, *(joined.name for joined in JOINED.values() if joined.kind == kind))
        return [
            (pattern.site, [stat for stat in known if matches_stat(pattern.stat, stat)])
            for pattern in self._patterns
            if matches(pattern.kind, kind)
        ]


def _partners(stat: str) -> tuple[tuple[str, str], ...]:
    return JOINED[stat].partners if stat in JOINED else ()


def _needs_hist(stat: str) -> bool:
    return stat in STATS and STATS[stat].needs_hist


def _evaluate(part: _Part, rows: Array, hist: Array | None) -> tuple[Array, NDArray[np.bool_] | None]:
    """Values of one stat, of shape (steps, sites), and a mask of where it was measured; None means everywhere."""
    own = rows[:, part.rows]
    seen = None
    if part.stat in _PAIRED:
        seen = ~np.isnan(own[..., _PAIRED[part.stat]])
    elif _needs_hist(part.stat):
        seen = own[..., HIST_N] > 0
    if part.stat in JOINED:
        return JOINED[part.stat].of(own, *(rows[:, partner] for partner in part.partners)), seen
    bins = np.zeros((1, NUM_BINS)) if hist is None else hist[:, part.rows]
    return STATS[part.stat].of(own, bins), seen
