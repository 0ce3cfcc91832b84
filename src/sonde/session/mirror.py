"""Chosen numbers and findings, forwarded to another tracker while training goes on. Slow ones delay nobody.

A mirror is an observer of the writer: it is shown every record, picks what was asked for, and hands it to a thread of
its own, in a queue that is bounded: what a dead server cannot take is dropped and counted, and is in the run anyhow.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

import numpy as np

from sonde.errors import UnknownNameError, UsageError
from sonde.record.items import FindingRow, NewScalar, NewSite
from sonde.record.observer import Observer, Said, Shown
from sonde.schema.layout import RunStatus
from sonde.schema.names import is_inspection, matches
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import NUM_BINS
from sonde.schema.stats import STATS

GROUP: Final = "sonde.mirrors"
"""The entry points by which sinks are found."""
DEFAULT_STATS: Final = ("grad/*/norm", "param/*/norm", "update/*/norm")
MAX_WAITING: Final = 1024
CLOSE_S: Final = 10.0


class Sink(Protocol):
    """Another tracker. Called on one thread of its own, which it may keep waiting."""

    def begin(self, run: Mapping[str, Any]) -> None:
        """The content of run.json: name, project, config, tags."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...

    def finding(self, found: FindingRow) -> None: ...

    def close(self, status: RunStatus) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """What to forward, and where to: `watch(model, mirror=Mirror(to="wandb", stats=["grad/*/rms"], every=100))`."""

    to: Any
    stats: Sequence[str] = DEFAULT_STATS
    """Patterns of series."""
    scalars: str = "*"
    """A pattern of logged numbers."""
    every: int = 10
    """Stats of every n-th step; logged numbers and findings are all forwarded."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"every= is at least 1; got {self.every}.")
        for pattern in self.stats:
            stat = pattern.rpartition("/")[2]
            if pattern.count("/") < 2 or not any(matches(stat, known) for known in STATS):
                raise UsageError(f'"{pattern}" names no stat to forward. Write kind/site/stat, such as "grad/*/norm".')


class Experiment:
    """A sink of any object with `log_metrics(values, step=…)`, as Comet's experiments and Lightning's loggers have."""

    def __init__(self, experiment: Any) -> None:
        self.experiment = experiment

    def begin(self, run: Mapping[str, Any]) -> None:
        if hasattr(self.experiment, "log_parameters"):
            self.experiment.log_parameters(dict(run["config"] or {}))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.experiment.log_metrics(dict(values), step=step)

    def finding(self, found: FindingRow) -> None:
        if hasattr(self.experiment, "log_text"):
            self.experiment.log_text(f"{found.severity} since step {found.step}: {found.message} {found.remedy}")

    def close(self, status: RunStatus) -> None:
        """It is the user's, and stays open."""


def name_of(run: Mapping[str, Any]) -> str:
    """What a run is called where names must differ; one without a name of its own is called by its id."""
    return str(run["id"]) if run["name"] in (None, run["id"]) else f"{run['name']}-{run['id']}"


def open_sink(to: Any) -> Sink:
    """The sink of that name; an error where there is none, or where its package is not installed."""
    if hasattr(to, "log_metrics"):
        return Experiment(to)
    if not isinstance(to, str):
        if all(hasattr(to, name) for name in ("begin", "numbers", "finding", "close")):
            return to  # type: ignore[no-any-return]
        known = ", ".join(_names())
        raise UsageError(f"mirror= takes {known}, or an object with log_metrics(); got {type(to).__name__}.")
    # Adapters stand above this room, and are plugged in.
    for entry in entry_points(group=GROUP, name=to):
        made: Callable[[], Sink] = entry.load()
        return made()
    raise UnknownNameError("mirror", to, _names())


def _names() -> list[str]:
    return sorted(entry.name for entry in entry_points(group=GROUP))


def mirrorings(mirror: Any, warn: Callable[[str], None]) -> list[Mirroring]:
    """Observers for `mirror=`: one of what `mirroring` takes, or several."""
    return [mirroring(one, warn) for one in (mirror if isinstance(mirror, list | tuple) else [mirror])]


def mirroring(mirror: Any, warn: Callable[[str], None]) -> Mirroring:
    """An observer for `mirror="wandb"`, a `Mirror`, or an object with `log_metrics`. Refuses what cannot be."""
    wanted = mirror if isinstance(mirror, Mirror) else Mirror(to=mirror)
    name = wanted.to if isinstance(wanted.to, str) else type(wanted.to).__name__
    return Mirroring(wanted, open_sink(wanted.to), lambda why: warn(f"the mirror {name}: {why}"))


@dataclass(slots=True)
class Mirroring:
    """An `Observer` for one sink."""

    mirror: Mirror
    sink: Sink
    on_failure: Callable[[str], None]
    num_dropped: int = 0
    _sites: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """Of a site: (name, stat) of what is forwarded."""
    _scalars: dict[int, str] = field(default_factory=dict)
    _waiting: queue.Queue[Callable[[], None] | None] = field(default_factory=lambda: queue.Queue(MAX_WAITING))
    _thread: threading.Thread | None = None

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        for id, site in sites.items():
            self._add_site(id, site)
        for id, name in scalars.items():
            self._add_scalar(id, name)
        run = {key: content.get(key) for key in ("id", "name", "project", "config", "tags", "notes")}
        self._thread = threading.Thread(target=self._work, args=(run,), name="sonde-mirror", daemon=True)
        self._thread.start()

    def saw(self, item: Shown) -> None:
        if isinstance(item, NewSite):
            self._add_site(item.id, item.site)
        elif isinstance(item, NewScalar):
            self._add_scalar(item.id, item.name)
        elif isinstance(item, StatsRecord) and item.step % self.mirror.every == 0:
            self._put_numbers(item.step, self._stats(item))
        elif isinstance(item, ScalarsRecord):
            for step, values in self._logged(item).items():
                self._put_numbers(step, values)

    def heard(self, items: Iterable[Said]) -> None:
        """What the rules have said."""
        for item in items:
            if isinstance(item, FindingRow):
                self._put(lambda found=item: self.sink.finding(found))  # type: ignore[misc]

    def look(self, now: float) -> Iterable[Said]:
        return ()

    def last_look(self, status: RunStatus) -> Iterable[Said]:
        if self._thread is not None:
            self._put(lambda: self.sink.close(status))
            self._put(None)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self.on_failure(f"it did not take the last numbers within {CLOSE_S:.0f} s")
            elif self.num_dropped:
                self.on_failure(f"it was too slow for {self.num_dropped} of the numbers; all of them are in the run")
        return ()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _add_site(self, id: int, site: Site) -> None:
        found = []
        for pattern in self.mirror.stats:
            place, _, wanted = pattern.rpartition("/")
            if matches(place, f"{site.kind}/{site.name}"):
                found += [(f"{site.kind}/{site.name}/{stat}", stat) for stat in STATS if matches(wanted, stat)]
        self._sites[id] = found

    def _add_scalar(self, id: int, name: str) -> None:
        if matches(self.mirror.scalars, name) and not is_inspection(name):
            self._scalars[id] = name

    def _stats(self, record: StatsRecord) -> dict[str, float]:
        values = {}
        hist_of = dict(zip(record.hist_index.tolist(), record.hist, strict=True))
        for place, id in enumerate(record.site_ids.tolist()):
            for name, stat in self._sites.get(id, ()):
                value = float(STATS[stat].of(record.rows[place], hist_of.get(place, np.zeros(NUM_BINS))))
                if not STATS[stat].needs_hist or place in hist_of:
                    values[name] = value
        return values

    def _logged(self, record: ScalarsRecord) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for id, step, value in zip(
            record.name_ids.tolist(), record.steps.tolist(), record.values.tolist(), strict=True
        ):
            if id in self._scalars:
                found.setdefault(step, {})[self._scalars[id]] = value
        return found

    def _put_numbers(self, step: int, values: dict[str, float]) -> None:
        if values:
            self._put(lambda: self.sink.numbers(step, values))

    def _put(self, work: Callable[[], None] | None) -> None:
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            self.num_dropped += 1

    def _work(self, run: Mapping[str, Any]) -> None:
        try:
            self.sink.begin(run)
            while (work := self._waiting.get()) is not None:
                work()
        except Exception as error:  # noqa: BLE001 - their tracker failed; the run is complete without it
            self.on_failure(f"{type(error).__name__}: {error}")
            while self._waiting.get() is not None:
                pass  # nobody is kept waiting for a thread that is gone


class Observers:
    """The rules first, if there are any, then the mirrors, which hear what the rules say. One that fails leaves the
    others."""

    def __init__(self, rules: Observer | None) -> None:
        self._rules = rules
        self._mirrors: list[Mirroring] = []
        self._new: queue.SimpleQueue[Mirroring] = queue.SimpleQueue()
        self._sites: dict[int, Site] = {}
        self._scalars: dict[int, str] = {}
        self._content: Mapping[str, Any] = {}
        self._asked: list[Mirror] = []

    def add(self, *mirrorings: Mirroring) -> None:
        """From any thread; they begin on the writer's. One that is there already would be told everything twice."""
        for mirroring in mirrorings:
            if mirroring.mirror not in self._asked:
                self._asked.append(mirroring.mirror)
                self._new.put(mirroring)

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        self._sites, self._scalars, self._content = dict(sites), dict(scalars), content
        if self._rules is not None:
            self._rules.begin(sites, scalars, content)

    def saw(self, item: Shown) -> None:
        if isinstance(item, NewSite):
            self._sites[item.id] = item.site
        elif isinstance(item, NewScalar):
            self._scalars[item.id] = item.name
        if not self._new.empty():
            self._begin_new()
        if self._rules is not None:
            self._rules.saw(item)
        for mirroring in self._mirrors:
            self._try(mirroring, lambda found: found.saw(item))

    def look(self, now: float) -> list[Said]:
        self._begin_new()
        return self._tell([] if self._rules is None else list(self._rules.look(now)))

    def last_look(self, status: RunStatus) -> list[Said]:
        self._begin_new()
        said = self._tell([] if self._rules is None else list(self._rules.last_look(status)))
        for mirroring in self._mirrors:
            self._try(mirroring, lambda found: found.last_look(status))
        return said

    def _tell(self, said: list[Said]) -> list[Said]:
        for mirroring in self._mirrors if said else ():
            self._try(mirroring, lambda found: found.heard(said))
        return said

    def _begin_new(self) -> None:
        while not self._new.empty():
            mirroring = self._new.get()
            self._mirrors.append(mirroring)
            self._try(mirroring, lambda found: found.begin(self._sites, self._scalars, self._content))

    def _try(self, mirroring: Mirroring, work: Callable[[Mirroring], object]) -> None:
        try:
            work(mirroring)
        except Exception as error:  # noqa: BLE001 - a mirror that fails leaves the rules and the other mirrors
            mirroring.on_failure(f"{type(error).__name__}: {error}")
            self._mirrors = [other for other in self._mirrors if other is not mirroring]
