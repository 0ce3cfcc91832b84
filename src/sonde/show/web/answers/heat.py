"""Heatmaps of layers × steps: of a stat, of health, and of the ratio of two runs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from sonde.run import Run
from sonde.schema.thinning import MISSING, Cells, Places, pool_into, scale_of
from sonde.show.web.caches.cache import ByteCache
from sonde.show.web.caches.diagnoses import Judged
from sonde.show.web.caches.heat_index import CACHE_BYTES, HeatIndex, Loader, Picture, colour_range, encode, even_width
from sonde.show.web.query import BadRequestError, NotFoundError, Query
from sonde.show.web.runs import Entry
from sonde.show.web.structure import stats_of, structure_of
from sonde.show.web.wire import Reply, binary_reply

MAX_COLUMNS: Final = 4096
DEFAULT_COLUMNS: Final = 1200
RETRY_MS: Final = 700
RARELY_MS: Final = 60_000
_WHOLE_COLUMNS: Final = 400
"""Number of columns used to choose the colour scale of a whole run."""
_RATIO_ROUND: Final = 4.0
_NUM_INDICES: Final = 12


class Heats:
    """Heatmaps of all runs, with one cache."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self.cache: ByteCache[Cells] = ByteCache(cache_bytes)
        self.ranges: ByteCache[tuple[float, float]] = ByteCache(1 << 20)
        self.loader = Loader()
        self._indices: OrderedDict[tuple[object, ...], HeatIndex] = OrderedDict()
        self._lock = threading.Lock()

    def heat(self, entry: Entry, run: Run, query: Query) -> Reply:
        query.only("kind", "stat", "from", "to", "w", "rows")
        structure = structure_of(run)
        kind = query.word("kind", structure.kinds())
        stat = query.stat(stats_of(kind))
        rows = structure.rows(kind)
        picture = self._picture(entry, run, stat, rows, query)
        low, high = self._range(entry, run, stat, rows, picture)
        begin, end = query.range("rows", len(rows))
        codes = encode(picture.places[:, begin:end], low, high)
        header = {
            "last_step": run.last_step,
            "kind": kind,
            "stat": stat,
            "scale": scale_of(stat),
            "lo": low,
            "hi": high,
            "labels": [],
        }
        return _reply(header, picture, rows[begin:end], codes)

    def ratio(self, entries: Sequence[Entry], runs: Sequence[Run], query: Query) -> Reply:
        """The ratio b / a for sites that both runs have."""
        query.only("a", "b", "kind", "stat", "from", "to", "w")
        structures = [structure_of(run) for run in runs]
        kind = query.word("kind", set(structures[0].kinds()) & set(structures[1].kinds()))
        stat = query.stat(stats_of(kind))
        if scale_of(stat) != "log10":
            raise BadRequestError(
                f"{stat} cannot be shown as a ratio; choose a stat that spans orders of magnitude, such as rms"
            )
        ids = [{s.sites[n].name: n for n in s.rows(kind)} for s in structures]
        names = [name for name in ids[0] if name in ids[1]]
        if not names:
            raise NotFoundError(f"the two runs have no {kind} sites in common")
        last_step = min(run.last_step for run in runs)
        span = query.span(last_step)
        pictures = [
            self._picture(entry, run, stat, [own[name] for name in names], query, span)
            for entry, run, own in zip(entries, runs, ids, strict=True)
        ]
        places, top = _log_ratio(pictures[0].places, pictures[1].places)
        header = {
            "last_step": last_step,
            "kind": kind,
            "stat": stat,
            "scale": "log10",
            "lo": -top,
            "hi": top,
            "labels": names,
        }
        is_exact = all(picture.is_exact for picture in pictures)
        is_coming = any(picture.is_coming for picture in pictures)
        picture = Picture(places, pictures[0].first, pictures[0].steps_per_column, is_exact, is_coming)
        return _reply(header, picture, [ids[0][name] for name in names], encode(places, -top, top))

    def _picture(
        self,
        entry: Entry,
        run: Run,
        stat: str,
        rows: Sequence[int],
        query: Query,
        span: tuple[int, int] | None = None,
    ) -> Picture:
        last_step = run.last_step
        first, last = span or query.span(last_step)
        last = max(min(last, last_step), first)
        index = self._index(entry, run, stat, rows)
        picture, absent = index.picture(
            run.heat(stat, rows), first, last, query.whole("w", 1, MAX_COLUMNS, DEFAULT_COLUMNS)
        )
        self.loader.read(index, absent, picture.steps_per_column)
        return picture

    def _index(self, entry: Entry, run: Run, stat: str, rows: Sequence[int]) -> HeatIndex:
        """The index from the last request: it knows the data that was not sealed yet."""
        key = entry.id, run.id, stat, tuple(rows), len(run.catalog.sites)
        with self._lock:
            found = self._indices.pop(key, None)
            if found is None:
                found = HeatIndex(stat, tuple(rows), entry, self.cache)
            self._indices[key] = found
            if len(self._indices) > _NUM_INDICES:
                self._indices.popitem(last=False)
            return found

    def _range(self, entry: Entry, run: Run, stat: str, rows: Sequence[int], picture: Picture) -> tuple[float, float]:
        """Colour scale of the whole run at a fixed width, so that it does not change while panning or zooming."""
        last = max(run.last_step, 0)
        # Recomputed when the run has grown by a fifth, or has ended; the range is also rounded.
        growth = int(4.0 * np.log2(last + 1.0))
        key = entry.id, stat, tuple(rows), growth, run.status, run.num_attempts
        known = self.ranges.get(key)
        if known is not None:
            return known
        is_whole = picture.first == 0 and picture.steps_per_column * len(picture.places) > last
        if is_whole and not picture.is_exact:  # an estimate is not cached
            return colour_range(picture.places, stat)
        index = self._index(entry, run, stat, rows)
        whole, absent = index.picture(run.heat(stat, rows), 0, last, _WHOLE_COLUMNS)
        self.loader.read(index, absent, whole.steps_per_column)
        range = colour_range(whole.places, stat)
        if whole.is_exact:
            self.ranges.put(key, range, 256)
        return range


def _log_ratio(a: Places, b: Places) -> tuple[Places, float]:
    """log10(b / a), missing or non-finite where either is; and the largest magnitude, rounded up."""
    columns = min(len(a), len(b))
    a, b = a[:columns], b[:columns]
    with np.errstate(invalid="ignore"):
        ratio = b - a
    ratio[np.isposinf(a) | np.isposinf(b)] = np.inf
    ratio[(a == MISSING) | (b == MISSING)] = MISSING
    finite = np.abs(ratio[np.isfinite(ratio)])
    top = float(np.percentile(finite, 99.5)) if finite.size else 0.0
    return ratio, max(np.ceil(top * _RATIO_ROUND) / _RATIO_ROUND, 1.0 / _RATIO_ROUND)


def health_heat(judged: Judged, query: Query) -> Reply:
    """Health as a heatmap: the code is 100 minus the score, so that pooling keeps the worst score of a cell."""
    query.only("kind", "stat", "from", "to", "w", "rows")
    query.word("stat", ("score",))
    found = judged.health
    first, last = query.span(judged.last_step)
    last = max(min(last, judged.last_step), first)
    width = even_width(first, last, query.whole("w", 1, MAX_COLUMNS, DEFAULT_COLUMNS))
    first = first // width * width
    ill = (100.0 - found.scores.T).astype(np.float32)
    ill[np.isnan(ill)] = MISSING
    places = np.full(((last - first) // width + 1, len(found.sites)), MISSING, np.float32)
    pool_into(places, Cells(found.steps, ill), first, width)
    _fill_forward(places, _stride(found.steps) // width + 1)
    begin, end = query.range("rows", len(found.sites))
    header: dict[str, Any] = {
        "last_step": judged.last_step,
        "kind": "health",
        "stat": "score",
        "scale": "linear",
        "lo": 100.0,
        "hi": 0.0,
        "labels": list(found.sites[begin:end]),
    }
    picture = Picture(places, first, width, True)
    return _reply(header, picture, [-1] * (end - begin), encode(places[:, begin:end], 0.0, 100.0))


def _stride(steps: Any) -> int:
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def _fill_forward(places: Places, reach: int) -> None:
    """Repeat each score until the next one: steps that were not measured are not gaps."""
    for _ in range(min(reach, len(places))):
        gaps = (places[1:] == MISSING) & (places[:-1] != MISSING)
        if not gaps.any():
            return
        places[1:][gaps] = places[:-1][gaps]


def _reply(header: dict[str, Any], picture: Picture, rows: Sequence[int], codes: Any) -> Reply:
    reply = binary_reply(
        {
            **header,
            "is_exact": picture.is_exact,
            "retry_ms": 0 if picture.is_exact else RETRY_MS if picture.is_coming else RARELY_MS,
            "first": picture.first,
            "steps_per_column": picture.steps_per_column,
            "num_columns": len(picture.places),
            "num_rows": len(rows),
        },
        {"rows": ("i32", np.array(rows, np.int32)), "codes": ("u8", codes)},
    )
    reply.is_final, reply.is_noise = picture.is_exact, True
    return reply
