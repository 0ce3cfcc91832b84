"""Values for a mirror, many at once, against an implementation that takes them one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sonde.schema.joined import JOINED, fields_of
from sonde.schema.names import matches, matches_stat, split_pattern
from sonde.schema.records import Site, StatsRecord
from sonde.schema.sketch import HIST_N, INDEX, NUM_BINS, NUM_FIELDS, PAIRED
from sonde.schema.stats import STATS
from sonde.session.observers.values import MirrorValues

KINDS = ("param", "grad", "update", "act", "optim")


def one_by_one(sites: dict[int, Site], patterns: list[Any], record: StatsRecord) -> dict[str, float]:
    place_of = {id: place for place, id in enumerate(record.site_ids.tolist())}
    id_of = {(site.kind, site.name): id for id, site in sites.items()}
    found = {}
    for id, place in place_of.items():
        site = sites[id]
        asked = [p for p in patterns if matches(p.kind, site.kind) and matches(p.site, site.name)]
        for stat in (*STATS, *(name for name, joined in JOINED.items() if joined.kind == site.kind)):
            if not any(matches_stat(pattern.stat, stat) for pattern in asked):
                continue
            pairs = JOINED[stat].partners if stat in JOINED else ()
            partners = [place_of.get(id_of.get((kind, site.name + suffix), -1), -1) for kind, suffix in pairs]
            row = record.rows[place]
            if -1 in partners or any(np.isnan(row[f]) for f in fields_of(stat) if f in {INDEX[n] for n in PAIRED}):
                continue
            if stat in JOINED:
                value = JOINED[stat].of(row[None], *(record.rows[[at]] for at in partners))
            elif not STATS[stat].needs_hist:
                value = STATS[stat].of(row[None], np.zeros((1, NUM_BINS)))
            elif row[HIST_N] > 0:
                hist = record.hist[record.hist_index.tolist().index(place)].astype(np.float64)
                value = STATS[stat].of(row[None], hist[None])
            else:
                continue
            found[f"{site.kind}/{site.name}/{stat}"] = float(value[0])
    return found


@pytest.mark.parametrize(
    "patterns", [["grad/*/norm"], ["*"], ["param/a*/*", "update/*/ratio", "grad/*/norm_raw"], ["grad/*/[nm]*", "act"]]
)
def test_values_of_many_sites(patterns: list[str]) -> None:
    random = np.random.default_rng(0)
    names = [f"{letter}.{number}.weight" for letter in "ab" for number in range(4)]
    sites = {id: Site(kind=kind, name=name) for id, (kind, name) in enumerate((k, n) for n in names for k in KINDS)}
    split = [split_pattern(pattern) for pattern in patterns]
    values = MirrorValues(split, "*")
    for id, site in sites.items():
        values.add_site(id, site)
    for step in range(6):
        ids = random.choice(len(sites), random.integers(1, len(sites)), replace=False).astype(np.int32)
        rows = random.random((len(ids), NUM_FIELDS)) * 10 + 1
        rows[:, [INDEX[name] for name in PAIRED]] = np.where(random.random((len(ids), len(PAIRED))) < 0.5, 1.0, np.nan)
        rows[:, HIST_N] = np.where(random.random(len(ids)) < 0.5, 100, 0)
        index = random.permutation(np.flatnonzero(rows[:, HIST_N] > 0)).astype(np.int32)
        record = StatsRecord(step, 0.0, ids, rows, index, random.random((len(index), NUM_BINS)).astype(np.float32))
        with np.errstate(all="ignore"):
            found, expected = values.of_stats(record), one_by_one(sites, split, record)
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_site_that_comes_later_is_found() -> None:
    values = MirrorValues([split_pattern("grad/*/n")], "*")
    record = StatsRecord.without_hist(0, 0.0, np.array([0, 1], np.int32), np.ones((2, NUM_FIELDS)))
    values.add_site(0, Site(kind="grad", name="a"))
    assert set(values.of_stats(record)) == {"grad/a/n"}
    values.add_site(1, Site(kind="grad", name="b"))
    assert set(values.of_stats(record)) == {"grad/a/n", "grad/b/n"}
