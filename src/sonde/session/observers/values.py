"""Selects the values of a record that go to a mirror: stats by pattern, including those of two sites, and scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.joined import JOINED, fields_of
from sonde.schema.names import Series, is_inspection, matches, matches_scalar, matches_stat
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import HIST_N, INDEX, NUM_BINS, PAIRED, Array
from sonde.schema.stats import STATS

_PAIRED: Final = frozenset(INDEX[name] for name in PAIRED)
_PLANS: Final = 64
"""Maximum number of site selections to remember; models with routed experts have a new one at every step."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One stat: the names of its series, and the rows of each, of shape (num, 1 + partners)."""

    stat: str
    names: list[str]
    places: NDArray[np.intp]


class MirrorValues:
    """Reads records one by one; every site and scalar is registered before its first record."""

    def __init__(self, stats: Sequence[Series], scalars: str) -> None:
        self._patterns, self._scalar_pattern = stats, scalars
        self._series: dict[str, dict[int, str]] = {}
        """The name of the series, by stat and site."""
        self._scalars: dict[int, str] = {}
        self._sites: dict[int, Site] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._stats: dict[tuple[int, str], list[str]] = {}
        """The stats that a pattern asks for, by pattern and kind."""
        self._plans: dict[bytes, list[_Part]] = {}
        """By the sites of a record."""

    def add_site(self, id: int, site: Site) -> None:
        self._sites[id], self._ids[site.kind, site.name] = site, id
        self._plans.clear()
        for number, pattern in enumerate(self._patterns):
            if matches(pattern.kind, site.kind) and matches(pattern.site, site.name):
                for stat in self._stats_of(number, site.kind):
                    self._series.setdefault(stat, {})[id] = f"{site.kind}/{site.name}/{stat}"

    def _stats_of(self, number: int, kind: str) -> list[str]:
        if (number, kind) not in self._stats:
            known = (*STATS, *(stat for stat, joined in JOINED.items() if joined.kind == kind))
            pattern = self._patterns[number].stat
            self._stats[number, kind] = [stat for stat in known if matches_stat(pattern, stat)]
        return self._stats[number, kind]

    def add_scalar(self, id: int, name: str) -> None:
        is_asked = self._scalar_pattern != "*" or not is_inspection(name)  # these are for the rules
        if is_asked and matches_scalar([self._scalar_pattern], name):
            self._scalars[id] = name

    def of_stats(self, record: StatsRecord) -> dict[str, float]:
        """Values by series; a series that was not measured in this record is absent."""
        values: dict[str, float] = {}
        for part in self._plan(record.site_ids):
            is_there = _is_measured(record, part.stat, part.places[:, 0])
            found = _values(record, part.stat, part.places[is_there])
            values.update(zip(compress(part.names, is_there.tolist()), found, strict=True))
        return values

    def _plan(self, site_ids: NDArray[np.int32]) -> list[_Part]:
        layout = site_ids.tobytes()
        if layout not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[layout] = self._make_plan(site_ids.tolist())
        return self._plans[layout]

    def _make_plan(self, site_ids: list[int]) -> list[_Part]:
        place_of = {id: place for place, id in enumerate(site_ids)}
        parts = []
        for stat, series in self._series.items():
            places = {
                series[id]: [place_of.get(partner, -1) for partner in (id, *self._partners(stat, id))]
                for id in place_of
                if id in series
            }
            complete = {name: found for name, found in places.items() if min(found) >= 0}
            if complete:
                parts.append(_Part(stat, list(complete), np.array(list(complete.values()), np.intp)))
        return parts

    def of_scalars(self, record: ScalarsRecord) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        columns = (record.name_ids.tolist(), record.steps.tolist(), record.values.tolist())
        for id, step, value in zip(*columns, strict=True):
            if id in self._scalars:
                found.setdefault(step, {})[self._scalars[id]] = value
        return found

    def _partners(self, stat: str, id: int) -> list[int]:
        """The ids of the other sites it needs; -1 for an unknown one."""
        pairs = JOINED[stat].partners if stat in JOINED else ()
        return [self._ids.get((kind, self._sites[id].name + suffix), -1) for kind, suffix in pairs]


def _is_measured(record: StatsRecord, stat: str, places: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Whether a histogram was taken and the paired sums exist, for each place."""
    paired = np.array(sorted(fields_of(stat) & _PAIRED), np.intp)
    found: NDArray[np.bool_] = np.isnan(record.rows[places[:, None], paired]).sum(axis=1) == 0
    if stat in STATS and STATS[stat].needs_hist:
        found &= record.rows[places, HIST_N] > 0
    return found


def _values(record: StatsRecord, stat: str, places: NDArray[np.intp]) -> list[float]:
    """Stats of rows with shape (num, 1 + partners)."""
    if not len(places):
        return []
    if stat in JOINED:
        values = JOINED[stat].of(*(record.rows[column] for column in places.T))
    else:
        values = STATS[stat].of(record.rows[places[:, 0]], _histograms(record, stat, places[:, 0]))
    found: list[float] = values.tolist()
    return found


def _histograms(record: StatsRecord, stat: str, places: NDArray[np.intp]) -> Array:
    if not STATS[stat].needs_hist:
        return np.zeros((1, NUM_BINS))
    at = np.zeros(len(record.site_ids), np.intp)
    at[record.hist_index] = np.arange(len(record.hist_index))
    return record.hist[at[places]].astype(np.float64)
