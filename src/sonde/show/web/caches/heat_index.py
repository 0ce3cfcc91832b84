"""A cache of heatmap cells: sealed files never change, so each is read once and pooled for every zoom level.

For very many rows the first reply uses merged steps, while a thread reads the single steps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sonde.errors import SondeError
from sonde.run import Heat, LiveCells, Segment
from sonde.schema.thinning import MISSING, ZERO_PLACE, Cells, Places, pool, pool_into, scale_of
from sonde.show.web.caches.background import BackgroundTasks
from sonde.show.web.caches.cache import ByteCache
from sonde.show.web.runs import Entry

COARSE_STEPS: Final = 8
"""Number of steps per group whose maximum is kept permanently."""
MAX_ROWS_AT_ONCE: Final = 4_000_000
"""Maximum number of sketches to read while the client waits: about half a second."""
CACHE_BYTES: Final = 512 << 20
HEAD_START_S: Final = 0.3
"""Delay before the thread starts, so that it does not compete with the first picture."""
_EDGE: Final = 0.5
"""Percentiles of the cells at either end of the colour scale."""
_MARGIN_DECADES: Final = 0.5
_ROUND: Final = 4.0


@dataclass(frozen=True, slots=True)
class Picture:
    """Values of (columns, rows), and whether each is the maximum of its single steps."""

    places: Places
    first: int
    steps_per_column: int
    is_exact: bool
    is_coming: bool = False
    """Whether the exact picture will follow: not if it would not fit in memory."""


@dataclass(slots=True)
class HeatIndex:
    """One stat of one kind of one run."""

    stat: str
    rows: tuple[int, ...]
    """Ids of sites."""
    entry: Entry
    cache: ByteCache[Cells]
    live: LiveCells = field(default_factory=LiveCells)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def picture(self, heat: Heat, first: int, last: int, num_columns: int) -> tuple[Picture, list[Segment]]:
        """The picture, and the files to read to make it exact; none if they would not fit in memory."""
        width = even_width(first, last, num_columns)
        first = first // width * width
        count = (last - first) // width + 1
        places = np.full((count, len(self.rows)), MISSING, np.float32)
        segments = heat.files(first, first + width * count - 1)
        known = {s.name: self._known(s, width) for s in segments}
        absent = [s for s in segments if known[s.name] is None]
        if heat.num_rows(absent) <= MAX_ROWS_AT_ONCE:
            for segment in absent:
                known[segment.name] = self.load(heat, segment, width)
            absent = []
        for cells in known.values():
            if cells is not None:
                pool_into(places, cells, first, width)
        if absent:
            self._estimate(heat, places, first, width, absent)
        pool_into(places, self.live.of(heat), first, width)
        fits = len(self.rows) * 4 * width * count // self._bucket(width) <= self.cache.max_bytes // 2
        return Picture(places, first, width, not absent, bool(absent) and fits), absent if fits else []

    def load(self, heat: Heat, segment: Segment, width: int) -> Cells:
        """Read a file's single steps and cache them: pooled permanently, and unpooled while there is room."""
        found = self._known(segment, width)
        if found is not None:
            return found
        with self._reading:
            fine = heat.cells(segment)
        coarse = pool(fine, COARSE_STEPS)
        self._put(segment, COARSE_STEPS, coarse)
        if self._bucket(width) == COARSE_STEPS:
            return coarse
        self._put(segment, 1, fine)
        return fine

    def _known(self, segment: Segment, width: int) -> Cells | None:
        return self.cache.get(self.key(segment, width))

    def key(self, segment: Segment, width: int) -> tuple[object, ...]:
        """The cache key for the cells of a file at this column width."""
        return self._key(segment, self._bucket(width))

    @staticmethod
    def _bucket(width: int) -> int:
        """Whether pooled steps suffice: a column must consist of complete groups."""
        return COARSE_STEPS if width % COARSE_STEPS == 0 else 1

    def _put(self, segment: Segment, bucket: int, cells: Cells) -> None:
        self.cache.put(self._key(segment, bucket), cells, cells.nbytes)

    def _key(self, segment: Segment, bucket: int) -> tuple[object, ...]:
        shown = segment.since, segment.until
        return self.entry.id, self.stat, self.rows, segment.name, segment.sha256, shown, bucket

    def _estimate(self, heat: Heat, places: Places, first: int, width: int, absent: Sequence[Segment]) -> None:
        """Cells that have not been read yet, from merged steps."""
        begin, end = min(s.first_step for s in absent), max(s.last_step for s in absent)
        for segment in heat.merged_files(begin, end, width):
            key = self._key(segment, 1)
            cells = self.cache.get(key)
            if cells is None:
                cells = heat.cells(segment)
                self.cache.put(key, cells, cells.nbytes)
            pool_into(places, cells, first, width)


def even_width(first: int, last: int, num_columns: int) -> int:
    """Steps per column: a multiple of the pooled groups if there are that many."""
    width = max(1, -(-(last - first + 1) // num_columns))
    return width if width <= COARSE_STEPS // 2 else -(-width // COARSE_STEPS) * COARSE_STEPS


def colour_range(places: Places, stat: str) -> tuple[float, float]:
    """Limits of the colour scale, rounded so that a growing run does not change them at every step."""
    if scale_of(stat) == "linear":
        return (-1.0, 1.0) if stat.endswith("cosine") else _linear_range(places)
    finite = places[np.isfinite(places) & (places > ZERO_PLACE)]
    if not finite.size:
        return -1.0, 0.0
    low, high = np.percentile(finite, (_EDGE, 100.0 - _EDGE))
    low, high = max(low - _MARGIN_DECADES, finite.min()), min(high + _MARGIN_DECADES, finite.max())
    low, high = np.floor(low * _ROUND) / _ROUND, np.ceil(high * _ROUND) / _ROUND
    return float(low), float(max(high, low + 1.0 / _ROUND))


def _linear_range(places: Places) -> tuple[float, float]:
    finite = places[np.isfinite(places)]
    top = float(finite.max()) if finite.size else 1.0
    return 0.0, 1.0 if top <= 1.0 else float(2.0 ** np.ceil(np.log2(top)))


def encode(places: Places, low: float, high: float) -> np.ndarray:
    """Codes of (rows, columns): 0 missing, 1 to 254 from low to high, 255 non-finite."""
    with np.errstate(invalid="ignore"):
        codes = np.clip((places - low) * (253.0 / (high - low)) + 1.5, 1.0, 254.0)
    codes[places == MISSING] = 0.0
    codes[np.isposinf(places)] = 255.0
    return np.ascontiguousarray(codes.astype(np.uint8).T)


class Loader(BackgroundTasks[tuple[HeatIndex, Segment, int]]):
    """Reads the files that pictures still need, one at a time."""

    def __init__(self) -> None:
        super().__init__("sonde-heat", _load, head_start_s=HEAD_START_S)

    def read(self, index: HeatIndex, segments: Sequence[Segment], width: int) -> None:
        for segment in segments:
            self.add(index.key(segment, width), (index, segment, width))


def _load(task: tuple[HeatIndex, Segment, int]) -> None:
    index, segment, width = task
    try:
        with index.entry.open() as run:
            index.load(run.heat(index.stat, index.rows), segment, width)
    except (SondeError, OSError):  # the run was deleted or damaged meanwhile; the next request reports it
        return
