"""Stats by pattern (`grad/*/norm`) as one long table: fields are read once, stats are computed on whole columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.errors import UnknownNameError
from sonde.read.run.state import RunState
from sonde.read.run.steps import ALL_STEPS, StepFilter
from sonde.read.run.tables import find_sites
from sonde.read.series.raw import Ids, RawStats, is_in, read_raw, take_rows
from sonde.schema.joined import JOINED, fields_of
from sonde.schema.names import Series, matches, matches_stat, split_pattern
from sonde.schema.records import Site
from sonde.schema.sketch import COUNTS, HIST_N, INDEX, NUM_BINS, PAIRED, Array
from sonde.schema.stats import STATS

_PAIRED_FIELDS = frozenset(INDEX[name] for name in PAIRED)
_WORDS = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [("step", pa.int64()), ("kind", _WORDS), ("site", _WORDS), ("stat", _WORDS), ("value", pa.float64())]
)


@dataclass(frozen=True)
class Question:
    """A query: the requested stats and sites, and the fields to read for them."""

    sites: dict[int, Site]
    wanted: dict[str, list[int]]
    """Site ids by stat, joined stats included."""

    @cached_property
    def ids_by_name(self) -> dict[tuple[str, str], int]:
        return {(site.kind, site.name): number for number, site in self.sites.items()}

    def partners(self, stat: str, site: int) -> list[int] | None:
        """The other sites that a joined stat needs; None if one of them was never measured."""
        name = self.sites[site].name
        found = [self.ids_by_name.get((kind, name + suffix)) for kind, suffix in JOINED[stat].partners]
        return None if None in found else [number for number in found if number is not None]

    @property
    def ids(self) -> Ids:
        needed: set[int] = set()
        for stat, sites in self.wanted.items():
            needed.update(sites)
            if stat in JOINED:
                needed.update(number for site in sites for number in self.partners(stat, site) or ())
        return np.array(sorted(needed), np.int64)

    @property
    def fields(self) -> frozenset[int]:
        return frozenset[int]().union(*(fields_of(stat) for stat in self.wanted))

    @property
    def needs_hist(self) -> bool:
        return any(STATS[stat].needs_hist for stat in self.wanted if stat in STATS)


def ask(sites: dict[int, Site], patterns: str | Sequence[str], *, strict: bool = True) -> Question:
    """Find the series that match patterns. A plain name that does not exist is an error with the closest match."""
    wanted: dict[str, set[int]] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        parts = split_pattern(pattern)
        found = find_sites(sites, parts)
        if strict and not found and sites:
            _refuse_plain_site(parts, sites.values())
        for stat in find_stat_names(parts.stat):
            own = [n for n in found if stat in STATS or sites[n].kind == JOINED[stat].kind]
            if own:
                wanted.setdefault(stat, set()).update(own)
    order = [*STATS, *JOINED]
    return Question(sites, {stat: sorted(wanted[stat]) for stat in order if stat in wanted})


def find_stat_names(pattern: str) -> list[str]:
    found = [name for name in (*STATS, *JOINED) if matches_stat(pattern, name)]
    if not found:
        raise UnknownNameError("stat", pattern, (*STATS, *JOINED))
    return found


def _refuse_plain_site(parts: Series, sites: Iterable[Site]) -> None:
    if any(sign in parts.site for sign in "*?["):
        return
    known = sorted({site.name for site in sites if matches(parts.kind, site.kind)})
    if not known:
        return
    raise UnknownNameError(f"{parts.kind} site", parts.site, known)


def read_stats(state: RunState, patterns: str | Sequence[str], steps: StepFilter) -> pa.Table:
    """The long table: one series after another, each ordered by step."""
    question = ask(state.catalog.require().sites, patterns)
    raw = read_raw(state, question.ids, steps, question.fields, with_hist=question.needs_hist)
    return long_table(question, raw)


def long_table(question: Question, raw: RawStats) -> pa.Table:
    pieces = [stat_column(question, raw, stat) for stat in question.wanted]
    index = np.concatenate([np.empty(0, np.intp), *(piece.index for piece in pieces)])
    value = np.concatenate([np.empty(0), *(piece.value for piece in pieces)])
    stat = np.repeat(np.arange(len(pieces), dtype=np.int32), [len(piece.index) for piece in pieces])
    return pa.Table.from_arrays(
        [
            pa.array(raw.step[index]),
            *_site_columns(question.sites, raw.site[index]),
            pa.DictionaryArray.from_arrays(pa.array(stat), pa.array(list(question.wanted), pa.string())),
            pa.array(value),
        ],
        schema=SCHEMA,
    )


def wide_table(state: RunState, sites: list[int], stats: Sequence[str]) -> pa.Table:
    """One row per site and step, one column per stat or field; null if it was not measured."""
    known = state.catalog.require().sites
    own = {stat: [n for n in sites if stat not in JOINED or known[n].kind == JOINED[stat].kind] for stat in stats}
    question = Question(known, own)
    ids = np.array(sites, np.int64)
    raw = read_raw(state, np.union1d(question.ids, ids), ALL_STEPS, question.fields, with_hist=question.needs_hist)
    keep = np.isin(raw.site, ids)
    columns: dict[str, pa.Array] = {"step": pa.array(raw.step[keep])}
    columns["kind"], columns["site"] = _site_columns(known, raw.site[keep])
    for stat in stats:
        piece = stat_column(question, raw, stat)
        values = np.full(len(raw), np.nan)
        values[piece.index] = piece.value
        # In SQL, NaN would sort above everything; missing values are null.
        columns[stat] = pa.array(values[keep], from_pandas=True)
        if stat in COUNTS:
            columns[stat] = columns[stat].cast(pa.int64())
    return pa.table(columns)


def _site_columns(sites: dict[int, Site], ids: Ids) -> list[pa.DictionaryArray]:
    """Kind and site as dictionary columns; rows contain only codes."""
    present, inverse = np.unique(ids, return_inverse=True)
    columns = []
    for texts in ([sites[int(i)].kind for i in present], [sites[int(i)].name for i in present]):
        words = sorted(set(texts))
        code_of = {word: code for code, word in enumerate(words)}
        codes = np.array([code_of[text] for text in texts], np.int32)
        columns.append(pa.DictionaryArray.from_arrays(pa.array(codes[inverse]), pa.array(words, pa.string())))
    return columns


@dataclass(frozen=True, slots=True)
class StatColumn:
    """A stat of some rows: the rows of the raw table, ordered by (site, step), and the values."""

    index: NDArray[np.intp]
    value: Array


def stat_column(question: Question, raw: RawStats, stat: str) -> StatColumn:
    if stat in JOINED:
        return _joined_column(question, raw, stat)
    index = np.flatnonzero(is_in(raw.site, np.array(sorted(question.wanted[stat]), np.int64)) & _is_present(stat, raw))
    rows = take_rows(raw.rows, index, fields_of(stat))
    if stat not in STATS:
        return StatColumn(index, rows[:, INDEX[stat]])
    hist = np.zeros((1, NUM_BINS))
    if STATS[stat].needs_hist and raw.hist is not None:
        hist = raw.hist[index].astype(np.float64)
    return StatColumn(index, STATS[stat].of(rows, hist))


def _is_present(stat: str, raw: RawStats) -> NDArray[np.bool_]:
    """Rows in which the stat was measured: a histogram was recorded, the paired sums exist."""
    present = np.ones(len(raw), np.bool_)
    if stat in STATS and STATS[stat].needs_hist:
        present &= raw.rows[:, HIST_N] > 0
    for field in fields_of(stat) & _PAIRED_FIELDS:
        present &= ~np.isnan(raw.rows[:, field])
    return present


def _joined_column(question: Question, raw: RawStats, stat: str) -> StatColumn:
    """Rows of each site and its partners at the same steps; steps that one of them lacks are left out."""
    indices, values = [np.empty(0, np.intp)], [np.empty(0)]
    for site in question.wanted[stat]:
        partners = question.partners(stat, site)
        if partners is None:
            continue
        spans = [raw.slice_of(number) for number in (site, *partners)]
        common = raw.step[spans[0]]
        for span in spans[1:]:
            common = np.intersect1d(common, raw.step[span], assume_unique=True)
        places = [span.start + np.searchsorted(raw.step[span], common) for span in spans]
        measured = np.ones(len(common), np.bool_)
        for field in fields_of(stat) & _PAIRED_FIELDS:
            measured &= ~np.isnan(raw.rows[places[0], field])
        indices.append(places[0][measured])
        values.append(JOINED[stat].of(*(take_rows(raw.rows, place[measured], fields_of(stat)) for place in places)))
    return StatColumn(np.concatenate(indices), np.concatenate(values))
