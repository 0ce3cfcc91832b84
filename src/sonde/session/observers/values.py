"""Which values of a record are sent to a mirror: stats by pattern, those that need two sites included, and scalars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.joined import JOINED
from sonde.schema.names import Series, is_inspection, matches, matches_scalar, matches_stat
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import HIST_N, INDEX, NUM_BINS, PAIRED, Array
from sonde.schema.stat_fields import fields_of
from sonde.schema.stats import STATS

_PAIRED: Final = frozenset(INDEX[name] for name in PAIRED)


class MirrorValues:
    """Looks at records one by one; every site and scalar is made known before its first record."""

    def __init__(self, stats: Sequence[Series], scalars: str) -> None:
        self._patterns, self._scalar_pattern = stats, scalars
        self._series: dict[str, dict[int, str]] = {}
        """By stat and site: the name of the series."""
        self._scalars: dict[int, str] = {}
        self._sites: dict[int, Site] = {}
        self._ids: dict[tuple[str, str], int] = {}

    def add_site(self, id: int, site: Site) -> None:
        self._sites[id], self._ids[site.kind, site.name] = site, id
        for pattern in self._patterns:
            if matches(pattern.kind, site.kind) and matches(pattern.site, site.name):
                for stat in (*STATS, *JOINED):
                    if matches_stat(pattern.stat, stat) and (stat in STATS or JOINED[stat].kind == site.kind):
                        self._series.setdefault(stat, {})[id] = f"{site.kind}/{site.name}/{stat}"

    def add_scalar(self, id: int, name: str) -> None:
        is_asked = self._scalar_pattern != "*" or not is_inspection(name)  # those are for the rules
        if is_asked and matches_scalar([self._scalar_pattern], name):
            self._scalars[id] = name

    def of_stats(self, record: StatsRecord) -> dict[str, float]:
        """By series; one that was not measured in this record is absent."""
        place_of = {id: place for place, id in enumerate(record.site_ids.tolist())}
        values: dict[str, float] = {}
        for stat, series in self._series.items():
            ids = [id for id in place_of if id in series]
            rows = [[place_of.get(partner, -1) for partner in (id, *self._partners(stat, id))] for id in ids]
            is_there = [min(places) >= 0 and _is_measured(record, stat, places[0]) for places in rows]
            found = _values(record, stat, np.array(list(compress(rows, is_there)), np.intp))
            values.update(zip((series[id] for id in compress(ids, is_there)), found, strict=True))
        return values

    def of_scalars(self, record: ScalarsRecord) -> dict[int, dict[str, float]]:
        """By step and name."""
        found: dict[int, dict[str, float]] = {}
        columns = (record.name_ids.tolist(), record.steps.tolist(), record.values.tolist())
        for id, step, value in zip(*columns, strict=True):
            if id in self._scalars:
                found.setdefault(step, {})[self._scalars[id]] = value
        return found

    def _partners(self, stat: str, id: int) -> list[int]:
        """The other sites it needs; -1 for one that is not known."""
        pairs = JOINED[stat].partners if stat in JOINED else ()
        return [self._ids.get((kind, self._sites[id].name + suffix), -1) for kind, suffix in pairs]


def _is_measured(record: StatsRecord, stat: str, place: int) -> bool:
    """Whether a histogram was taken, and the paired sums are there."""
    row = record.rows[place]
    if stat in STATS and STATS[stat].needs_hist and not row[HIST_N] > 0:
        return False
    return not any(np.isnan(row[field]) for field in fields_of(stat) & _PAIRED)


def _values(record: StatsRecord, stat: str, places: NDArray[np.intp]) -> list[float]:
    """Of rows (num, 1 + partners)."""
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
    at = {place: index for index, place in enumerate(record.hist_index.tolist())}
    return record.hist[[at[place] for place in places.tolist()]].astype(np.float64)
