"""A run whose ranks recorded parts of it: their files as if one process had written them.

Each rank has its own folder, with its own numbers for the sites. Rows of one site and step are merged when they are
read; of ranks that hold the same part, the first counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError, SondeError
from sonde.read.run.addends import AddendLogs, Sums
from sonde.read.run.catalog import Catalog, Segment, read_rows
from sonde.read.run.folder import read_manifest
from sonde.read.run.log import list_folder
from sonde.read.run.segments import EVERYTHING
from sonde.read.run.state import RunState
from sonde.schema.addends import Addends
from sonde.schema.attempts import NO_LIMIT, Attempt
from sonde.schema.layout import RANKS_FOLDER, RUN_FILE, Stream
from sonde.schema.records import Frame, ScalarsRecord, Shard, Site, StatsRecord, to_json
from sonde.schema.sketch import Array

_FOLDER: Final = re.compile(r"rank-(\d{4,8})")
_FOREIGN: Final = 1 << 20
"""Ids from here on belong to sites that the first rank does not have."""
_OF_SAMPLES: Final = frozenset({"act", "actgrad"})
_WHOLE: Final = Shard(part=0, parts=1)


@dataclass
class RankRows:
    """The records of another rank."""

    number: int
    state: RunState
    addends: AddendLogs
    to_shown: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _own_ids: dict[int, int] = field(default_factory=dict)

    def set_ids(self, shown: dict[int, int]) -> None:
        """The sites of this rank that count: their id in the run by their own."""
        self.to_shown = np.full(max(self.state.catalog.sites, default=-1) + 1, -1, np.int64)
        self.to_shown[list(shown)] = list(shown.values())
        self._own_ids = {id: own for own, id in shown.items()}

    def own(self, sites: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array(sorted(self._own_ids[id] for id in sites.tolist() if id in self._own_ids), np.int64)

    def attempt_of(self, number: int, attempts: tuple[Attempt, ...]) -> int:
        """The attempt of the first rank that one of this rank belongs to: it started at the same step and, of several,
        closest in time, because clocks differ."""
        own = self.state.catalog.attempts
        if not attempts or number >= len(own):
            return 0
        same = [one for one in attempts if one.first_step == own[number].first_step] or attempts
        return min(same, key=lambda one: abs(one.time - own[number].time)).number


@dataclass
class ShardedState(RunState):
    """Reads like the state of a run with one rank. Without folders of other ranks it is one."""

    ranks: list[RankRows] = field(default_factory=list)
    _first: Catalog = field(default_factory=Catalog)
    """The catalog of the first rank."""
    _foreign: dict[tuple[str, str], int] = field(default_factory=dict)
    _homes: dict[int, tuple[RankRows, int]] = field(default_factory=dict)
    """Scalars that the first rank has not logged: the rank that has, and its id for it."""
    _sizes: Array = field(default_factory=lambda: np.empty(0))
    """By id: the number of elements of a sharded site; 0 for any other."""
    _merged: dict[tuple[Stream, int], list[Segment]] = field(default_factory=dict)
    _frames: list[Frame] | None = None
    _num_addends: dict[int, int] = field(default_factory=dict)
    """By id: of how many addends a site is the sum."""
    _own_addends: AddendLogs | None = None
    _sums: Sums | None = None

    def refresh(self) -> None:
        before, seen = self._signature, [rank.state._signature for rank in self.ranks]
        super().refresh()
        if self._signature is not before:
            self._first = self.catalog
        self._find_ranks()
        for rank in self.ranks:
            rank.state.refresh()
        own = self._own_addends = self._own_addends or AddendLogs(self.run)
        grown = {logs.refresh() for logs in (own, *(rank.addends for rank in self.ranks))}
        if True in grown:
            self._sums = None
        if self._signature is not before or seen != [rank.state._signature for rank in self.ranks]:
            self._merged, self._frames, self._sums = {}, None, None
            self._merge_catalogs()

    def _find_ranks(self) -> None:
        known = {rank.number for rank in self.ranks}
        for name in list_folder(self.run, RANKS_FOLDER):
            match = _FOLDER.fullmatch(name)
            if match is None or int(match[1]) in known or not (self.run / RANKS_FOLDER / name / RUN_FILE).is_file():
                continue
            try:
                folder = self.run / RANKS_FOLDER / name
                self.ranks.append(RankRows(int(match[1]), RunState(folder, read_manifest(folder)), AddendLogs(folder)))
            except SondeError as error:
                self.damage[f"{RANKS_FOLDER}/{name}"] = str(error)
        self.ranks.sort(key=lambda rank: rank.number)

    # ------------------------------------------------------------------------------------------------------------ sites

    def _merge_catalogs(self) -> None:
        """Give every site one id, and decide which rank counts for which part of it."""
        first = self._first
        self._num_addends = {id: shard.parts for id, shard in first.shards.items() if shard.how == "sum"}
        ids = {(site.kind, site.name): id for id, site in first.sites.items()}
        sites, taken = dict(first.sites), {(id, first.shards.get(id, _WHOLE)) for id in first.sites}
        sharded = {id for id, shard in first.shards.items() if shard.how == "shard"}
        for rank in self.ranks:
            catalog, shown = rank.state.catalog, {}
            for own, site in catalog.sites.items():
                id = ids.setdefault((site.kind, site.name), _FOREIGN + len(self._foreign))
                if id >= _FOREIGN:
                    self._foreign.setdefault((site.kind, site.name), id)
                    sites.setdefault(id, site)
                shard = catalog.shards.get(own, _WHOLE)
                if (id, shard) not in taken:
                    taken.add((id, shard))
                    shown[own] = id
                    if shard.how == "sum":
                        self._num_addends[id] = shard.parts
                    if shard.how == "shard" and shard.parts > 1:
                        sharded.add(id)
            rank.set_ids(shown)
            problems = [f"rank {rank.number}: {problem}" for problem in rank.state.problems]
            self.problems += [problem for problem in problems if problem not in self.problems]
        if self.ranks or sharded:
            self._sizes = np.zeros(max(sites, default=-1) + 1)
            for id in sharded:
                self._sizes[id] = _num_elements(sites[id])
            self.catalog = replace(first, sites=sites, scalar_names=self._all_scalars())

    def _all_scalars(self) -> dict[int, str]:
        """The scalars of the first rank, and those that only others have logged, such as the loss of a pipeline."""
        names, self._homes = dict(self._first.scalar_names), {}
        known = set(names.values())
        for rank in self.ranks:
            for own, name in rank.state.catalog.scalar_names.items():
                if name not in known:
                    known.add(name)
                    id = self._foreign.setdefault(("scalar", name), _FOREIGN + len(self._foreign))
                    names[id] = name
                    self._homes[id] = rank, own
        return names

    def scalar_homes(self, wanted: Collection[int]) -> list[tuple[RunState, dict[int, int]]]:
        found: dict[int, tuple[RunState, dict[int, int]]] = {}
        for id in wanted:
            if id in self._homes:
                rank, own = self._homes[id]
                found.setdefault(rank.number, (rank.state, {}))[1][own] = id
        return list(found.values())

    @property
    def is_divided(self) -> bool:
        return bool(self.ranks)

    def ids_in(self, segment: Segment) -> RankRows | None:
        if segment.rank == self.manifest.rank:
            return None
        return next((rank for rank in self.ranks if rank.number == segment.rank), None)

    def is_whole(self, site: NDArray[np.int64], count: Array, *, is_merged: bool) -> Any:
        if not self._sizes.any():
            return None
        size = self._sizes[site]
        with np.errstate(invalid="ignore", divide="ignore"):
            fits = count % size == 0 if is_merged else count == size
        return (size == 0) | (fits & (count > 0))

    # ------------------------------------------------------------------------------------------------------------- rows

    def segments_of(self, stream: Stream, level: int = 0) -> list[Segment]:
        own = self.own_segments(stream, level)
        if stream != "stats" or not self.ranks:
            return own
        found = self._merged.get((stream, level))
        if found is None:
            found = self._merged[stream, level] = [*own, *(s for rank in self.ranks for s in self._of(rank, level))]
        return found

    def _of(self, rank: RankRows, level: int) -> list[Segment]:
        """The files of a rank, under their names in the run, without steps that the run has abandoned."""
        prefix = rank.state.run.relative_to(self.run).parts
        found = []
        for segment in rank.state.own_segments("stats", level):
            limit = self._limit(rank, segment.attempt)
            if segment.first_step < limit:
                parts = (*prefix, *segment.parts)
                found.append(replace(segment, parts=parts, rank=rank.number, until=min(segment.until, limit)))
        return found

    def _limit(self, rank: RankRows, attempt: int) -> int:
        """The first step at which rows of a rank's attempt are hidden because the run returned to an earlier step."""
        number = rank.attempt_of(attempt, self.catalog.attempts)
        if number > self.history.last:
            return -NO_LIMIT
        return self.history.abandoned_from(number)

    def live_frames(self, stream: Stream) -> list[Frame]:
        own = self.own_frames(stream)
        if stream != "stats" or not self.ranks:
            return own
        if self._frames is None:
            self._frames = [*own, *(frame for rank in self.ranks for frame in self._frames_of(rank))]
        return self._frames

    def _frames_of(self, rank: RankRows) -> list[Frame]:
        found = []
        for frame in rank.state.own_frames("stats"):
            record = frame.record
            limit = self._limit(rank, rank.state.attempt_of("stats", frame.sequence))
            if isinstance(record, StatsRecord) and record.step < limit:
                found.append(replace(frame, record=_with_ids(record, rank.to_shown)))
        return found

    # ------------------------------------------------------------------------------------------------- ranks one by one

    def by_rank(self) -> dict[int, RunState]:
        own = RunState(self.run, self.manifest, self.view)
        own.refresh()
        return {self.manifest.rank: own, **{rank.number: rank.state for rank in self.ranks}}

    def events_of_ranks(self) -> list[tuple[Any, ...]]:
        """Warnings, values that stopped being finite, and fingerprints of weights that another rank holds too.
        Everything else repeats the first rank."""
        found = self._fingerprints()
        for rank in self.ranks:
            rows = read_rows(rank.state.run, "events", is_live=rank.state.is_held)
            for _, time, step, type, severity, message, details, attempt in rows:
                if severity != "info" and step < self._limit(rank, attempt):
                    more = to_json({**json.loads(details), "rank": rank.number})
                    found.append((time, step, type, severity, f"rank {rank.number}: {message}", more))
        return found

    def _fingerprints(self) -> list[tuple[Any, ...]]:
        """Fingerprints of ranks whose weights an earlier rank holds too, each with that of the earlier rank."""
        found: list[tuple[Any, ...]] = []
        first: dict[tuple[str, str], tuple[int, dict[int, float]]] = {}
        for number, state in self.by_rank().items() if self.ranks else ():
            holds = state.manifest.facts.get("holds")
            for name, key in holds.items() if isinstance(holds, dict) else ():
                own = _logged(state, f"model/weights/{name}")
                values = {step: value for step, (_, value) in own.items()}
                of, reference = first.setdefault((name, str(key)), (number, values))
                if of == number:
                    continue
                for step, (time, value) in own.items():
                    if step in reference:
                        details = {"rank": number, "value": value, "of": of, "reference": reference[step]}
                        found.append((time, step, "fingerprint", "info", f"rank {number}: weights", to_json(details)))
        return found

    def warnings(self) -> list[str]:
        found = super().warnings()
        for rank in self.ranks:
            found += [text for why in rank.state.warnings() if (text := f"rank {rank.number}: {why}") not in found]
            status = rank.state.status()
            if status.status == "crashed":
                found.append(f"rank {rank.number}: {status.reason}")
        num_missing = self.manifest.world_size - len(self.by_rank())
        if self._sizes.any() and num_missing > 0:
            found.append(
                f"{num_missing} of {self.manifest.world_size} ranks have no folder in this run: tensors that lack a "
                "part are not shown. If each machine wrote to its own disk, copy the folders in ranks/ together"
            )
        return found

    # ------------------------------------------------------------------------------------------------------------- sums

    def sums(self) -> Sums | None:
        if not self._num_addends:
            return None
        if self._sums is None:
            self._sums = sums = Sums(self._num_addends, {id: self.catalog.sites[id].dtype for id in self._num_addends})
            assert self._own_addends is not None
            for record in self._own_addends.records:
                if record.attempt <= self.history.last and record.step < self.history.limit(record.attempt):
                    _add(sums, self.manifest.rank, record, record.site_ids)
            for rank in self.ranks:
                for record in rank.addends.records:
                    if record.step < self._limit(rank, record.attempt) and (record.site_ids < len(rank.to_shown)).all():
                        _add(sums, rank.number, record, rank.to_shown[record.site_ids])
        return self._sums


def _add(sums: Sums, rank: int, record: Addends, ids: NDArray[Any]) -> None:
    for id, values, factor in zip(ids.tolist(), record.values, record.factors.tolist(), strict=True):
        if id in sums.parts:
            sums.add(rank, record.step, id, values, factor)


def _with_ids(record: StatsRecord, to_shown: NDArray[np.int64]) -> StatsRecord:
    ids = np.full(len(record.site_ids), -1, np.int64)
    known = record.site_ids < len(to_shown)
    ids[known] = to_shown[record.site_ids[known]]
    return replace(record, site_ids=ids.astype(np.int32))


def _logged(state: RunState, name: str) -> dict[int, tuple[float, float]]:
    """(time, value) of a scalar by step, read from the logs and files of one rank."""
    id = next((id for id, known in state.catalog.scalar_names.items() if known == name), None)
    found: dict[int, tuple[float, float]] = {}
    if id is None:
        return found
    columns = ["step", "name", "time", "value"]
    for segment in state.own_segments("scalars"):
        try:
            table = state.segments.read(segment, "name", np.array([id], np.int64), EVERYTHING, columns)
        except CorruptError as error:
            state.damage[segment.name] = str(error)
            continue
        for row in [] if table is None else table.to_pylist():
            if row["name"] == id:
                found[row["step"]] = row["time"], row["value"]
    for frame in state.own_frames("scalars"):
        if isinstance(record := frame.record, ScalarsRecord):
            for place in np.flatnonzero(record.name_ids == id):
                found[int(record.steps[place])] = float(record.times[place]), float(record.values[place])
    return found


def _num_elements(site: Site) -> int:
    """Elements of the whole tensor in one step; 0 if steps differ."""
    if site.kind in _OF_SAMPLES:
        return 0
    return math.prod(site.shape) * (2 if site.dtype.startswith("complex") else 1)


def open_state(run: Path, attempt: int | None = None) -> RunState:
    state = ShardedState(run, read_manifest(run), attempt)
    state.refresh()
    return state
