"""The first divergence of two runs: the first step, and in it the first site in forward order, beyond rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.compare.frameworks import other_site
from sonde.read.compare.rounding import Tolerance
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.cut import by_series, series_of
from sonde.read.series.raw import read_raw
from sonde.read.series.scalars import read_scalars
from sonde.read.series.stats import ask, long_table
from sonde.schema.forward_order import FORWARD, WORDS, ForwardOrder
from sonde.schema.names import INSPECTED, Series, inspected_series
from sonde.schema.sketch import Array
from sonde.schema.window import Column

_FLOOR: Final = 0.2
"""Fraction of the tolerance, relative to the largest of its kind in the step: gradients that are pure noise differ."""
# Norms alone would miss a sign change; the mean is compared relative to the mean magnitude: it may be near zero.
_STATS: Final = ("norm", "max_abs", "mean", "nonfinite_fraction")
_SCALE: Final = "abs_mean"
_HASHES: Final = ("hash", "ids_hash")
"""Hashes of a batch, which are either equal or not."""
_OF_DATA: Final = {
    *(("data", "batch", stat) for stat in _HASHES),
    *(("data", site, stat) for site in ("input", "target") for stat in ("std", "abs_max")),
    *(("data", "loss", stat) for stat in ("train", "value")),
}
"""Inspections that should agree; others are near zero, or duplicate an activation."""
_FIRST_CHUNK: Final = 64
_LAST_CHUNK: Final = 4096
# Words in the names of scalars that never agree: times and rates.
_METERS: Final = {
    *("time", "times", "timing", "seconds", "second", "sec", "secs", "s", "ms", "minutes", "hours", "elapsed"),
    *("duration", "eta", "clock", "throughput", "speed", "fps", "per", "memory", "mem", "gpu", "cpu", "rss"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between two runs that rounding does not explain."""

    step: int
    series: str
    """`act/blocks.2.mlp/norm`, or the name of a scalar."""
    kind: str
    """Kind of the site; empty for a scalar."""
    site: str
    stat: str
    module_type: str
    a: float
    b: float
    difference: float
    """|a - b| divided by the larger magnitude; NaN if either is non-finite."""
    tolerance: float
    """The relative difference that rounding explains."""
    dtype: str
    before: float
    """The largest such difference of this series at earlier steps; near the tolerance it suggests rounding."""
    num_before: int
    """Number of series that come earlier in the same step and agree."""
    num_apart: int
    """Number of series that differ at this step, including this one."""
    unseen: tuple[str, ...]
    """Data that comes earlier in this step but was not recorded."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_divergence(
    a: RunState, b: RunState, order: ForwardOrder, tolerance: Tolerance, names: Mapping[str, str] | None = None
) -> Divergence | None:
    """Find the first divergence chunk by chunk, so that an early one is found without reading the rest.

    `names` maps the parameters of b to their names in a, if the runs use different frameworks.
    """
    last = min(a.last_step(), b.last_step())
    before: dict[Series, float] = {}
    for span in _chunks(last):
        theirs = _read(b, span)
        if names:
            theirs = {name._replace(site=other_site(name.kind, name.site, names)): c for name, c in theirs.items()}
        pair = _read(a, span), theirs
        found = _first_in(pair, order, tolerance, before)
        if found is not None:
            return found
    return None


def _chunks(last: int) -> Iterator[Span]:
    first, size = 0, _FIRST_CHUNK
    while first <= last:
        yield Span(first, min(first + size - 1, last))
        first, size = first + size, min(2 * size, _LAST_CHUNK)


def _read(state: RunState, span: Span) -> dict[Series, Column]:
    """All series of these steps that should agree in two runs of the same program."""
    question = ask(state.catalog.require().sites, [f"*/*/{stat}" for stat in (*_STATS, _SCALE)], strict=False)
    found: dict[Series, Column] = {}
    if question.wanted:
        raw = read_raw(state, question.ids, StepFilter(span), question.fields, with_hist=False)
        table = by_series(long_table(question, raw), ("kind", "site", "stat"))
        found = {series_of(name): column for name, column in table.items()}
    try:
        scalars = by_series(read_scalars(state, "*", StepFilter(span)), ("name",))
    except CorruptError:  # listed in the run's warnings; the rest can still be compared
        return found
    for name, column in scalars.items():
        inspected = inspected_series(name)
        if inspected is not None:
            if inspected in _OF_DATA:
                found[inspected] = column
        elif not _is_meter(name):
            found[Series("", name, "")] = column
    return found


def _is_meter(name: str) -> bool:
    words = name.lower()
    for sign in "/_-. ":
        words = words.replace(sign, " ")
    return not _METERS.isdisjoint(words.split())


def _first_in(
    pair: tuple[Mapping[Series, Column], Mapping[Series, Column]],
    order: ForwardOrder,
    tolerance: Tolerance,
    before: dict[Series, float],
) -> Divergence | None:
    """Find the first difference in one chunk; remembers how far series differed before."""
    ignored = {_SCALE, *(_HASHES if tolerance.is_mixed else ())}
    floors = _floors(pair)
    noise = _noise(pair, floors, tolerance)
    owners = {order.owner("grad", site) for site in noise}
    common = [
        name
        for name in pair[0]
        if name in pair[1] and name.stat not in ignored and not _is_moved_by(name, noise, owners, order)
    ]
    measured = {name: _compare(name, pair, floors, tolerance) for name in common}
    firsts = {name: int(m.steps[np.argmax(m.is_apart)]) for name, m in measured.items() if m.is_apart.any()}
    step = min(firsts.values(), default=None)
    for name, m in measured.items():
        earlier = m.apart[m.steps < step] if step is not None else m.apart
        if len(earlier):
            before[name] = max(before.get(name, 0.0), float(np.nan_to_num(earlier).max()))
    if step is None:
        return None
    here = sorted((n for n, m in measured.items() if step in m.steps), key=lambda n: (order.key(*n[:2]), _rank(n), n))
    first = next(name for name in here if firsts.get(name) == step)
    return _divergence(first, step, here, firsts, measured[first], order, tolerance, before)


def _noise(
    pair: tuple[Mapping[Series, Column], Mapping[Series, Column]],
    floors: Mapping[tuple[str, str], dict[int, float]],
    tolerance: Tolerance,
) -> set[str]:
    """Parameters whose gradient is only rounding, such as a bias before a norm: Adam amplifies it to full steps."""
    largest = floors.get(("grad", "norm"), {})
    found: set[str] = set()
    for series in pair:
        for name, (steps, values) in series.items():
            if name.kind == "grad" and name.stat == "norm" and len(values):
                limits = np.array([largest.get(int(step), 0.0) for step in steps]) * tolerance.of("grad", name.site)[0]
                if (values <= limits).all():
                    found.add(name.site)
    return found


def _is_moved_by(name: Series, noise: set[str], owners: set[str], order: ForwardOrder) -> bool:
    """Whether a series depends on such a parameter: itself, its optimizer state, the output of its module."""
    if name.kind in ("act", "actgrad"):
        return order.owner(name.kind, name.site) in owners
    if name.kind == "optim":
        return name.site.rpartition(".")[0] in noise
    return name.kind in ("param", "grad", "update") and name.site in noise


def _rank(name: Series) -> int:
    """The order in which the stats of one site are reported."""
    return _STATS.index(name.stat) if name.stat in _STATS else 0


def _divergence(
    first: Series,
    step: int,
    here: list[Series],
    firsts: Mapping[Series, int],
    measured: _Measured,
    order: ForwardOrder,
    tolerance: Tolerance,
    before: Mapping[Series, float],
) -> Divergence:
    at = int(np.searchsorted(measured.steps, step))
    stages = {order.stage(*name[:2]) for name in here}
    limit, dtype = tolerance.of(*first[:2])
    is_early = order.stage(*first[:2]) > FORWARD and FORWARD not in stages
    return Divergence(
        step=step,
        series=str(first) if first.kind else first.site,
        kind=first.kind,
        site=first.site,
        stat=first.stat,
        module_type=order.module_type(*first[:2]),
        a=float(measured.a[at]),
        b=float(measured.b[at]),
        difference=float(measured.apart[at]),
        tolerance=0.0 if first.stat in _HASHES else limit,
        dtype=dtype,
        before=before.get(first, 0.0),
        num_before=here.index(first),
        num_apart=sum(firsts.get(name) == step for name in here),
        unseen=(WORDS[FORWARD],) if is_early else (),
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """One series of two runs at their common steps."""

    steps: NDArray[np.int64]
    a: Array
    b: Array
    apart: Array
    is_apart: NDArray[np.bool_]


def _compare(
    name: Series,
    pair: tuple[Mapping[Series, Column], Mapping[Series, Column]],
    floors: Mapping[tuple[str, str], dict[int, float]],
    tolerance: Tolerance,
) -> _Measured:
    (steps_a, values_a), (steps_b, values_b) = pair[0][name], pair[1][name]
    steps, in_a, in_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    a, b = values_a[in_a], values_b[in_b]
    limit = 0.0 if name.stat in _HASHES else tolerance.of(*name[:2])[0]
    scale = np.maximum(np.abs(a), np.abs(b))
    if name.stat == "mean":
        scale = np.maximum(scale, _at(pair[0].get(Series(name.kind, name.site, _SCALE)), steps))
        scale = np.maximum(scale, _at(pair[1].get(Series(name.kind, name.site, _SCALE)), steps))
    floor = floors.get((name.kind, name.stat), {})
    floor_values = _FLOOR * limit * np.array([floor.get(int(step), 0.0) for step in steps])
    if name.kind == "update":
        weight = Series("param", name.site, _SCALE if name.stat == "mean" else name.stat)
        floor_values = np.maximum(floor_values, tolerance.of_update() * _at(pair[0].get(weight), steps))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        distance = np.abs(a - b)
        apart = np.where(distance == 0, 0.0, distance / scale)
        is_close = (distance <= limit * scale) | (distance <= floor_values)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    return _Measured(
        steps, a, b, np.where(is_same, 0.0, np.where(finite, apart, np.nan)), ~is_same & ~(is_close & finite)
    )


def _at(column: Column | None, steps: NDArray[np.int64]) -> Array:
    """Values at these steps; 0 where there are none."""
    values = np.zeros(len(steps))
    if column is not None:
        _, here, there = np.intersect1d(steps, column[0], assume_unique=True, return_indices=True)
        values[here] = np.nan_to_num(np.abs(column[1][there]))
    return values


def _floors(pair: tuple[Mapping[Series, Column], Mapping[Series, Column]]) -> dict[tuple[str, str], dict[int, float]]:
    """The largest magnitude of each stat of each kind, by step."""
    columns: dict[tuple[str, str], list[Column]] = {}
    for series in pair:
        for name, column in series.items():
            if name.kind and name.kind not in INSPECTED:
                columns.setdefault((name.kind, _SCALE_OF.get(name.stat, name.stat)), []).append(column)
    floors: dict[tuple[str, str], dict[int, float]] = {}
    for key, own in columns.items():
        steps = np.concatenate([column[0] for column in own])
        values = np.abs(np.concatenate([column[1] for column in own]))
        unique, place = np.unique(steps, return_inverse=True)
        largest = np.zeros(len(unique))
        np.maximum.at(largest, place, np.where(np.isfinite(values), values, 0.0))
        floors[key] = dict(zip(unique.tolist(), largest.tolist(), strict=True))
    return floors


_SCALE_OF: Final = {_SCALE: "mean"}
