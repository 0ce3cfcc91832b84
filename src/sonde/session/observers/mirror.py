"""Forwards chosen values and findings to another tracker while training continues.

A mirror observes the writer: it sees every record, picks the requested values, and passes them to its own thread. A
tracker that is slow, fails or does not start never blocks training; undelivered values are counted and reported.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final

from sonde.errors import UnknownNameError, UsageError
from sonde.schema.joined import JOINED
from sonde.schema.layout import RunStatus
from sonde.schema.names import KINDS, Series, matches, matches_stat
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord
from sonde.schema.stats import STATS
from sonde.session.observers.delivery import Delivery, Sink, Unopened
from sonde.session.observers.values import MirrorValues
from sonde.write.items import Facts, FindingRow, NewAttempt, NewScalar, NewSite
from sonde.write.observer import Item, Observer, Output

GROUP: Final = "sonde.mirrors"
"""The group of entry points in which sinks are registered."""
DEFAULT_STATS: Final = ("grad/*/norm", "param/*/norm", "update/*/norm")
CLOSE_S: Final = 10.0
"""How long the end of a run waits for its mirrors if the run has no deadline."""
_SHARE: Final = 0.8
"""The fraction of a deadline for mirrors; the rest is for the run's own files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """Values to forward, and where to: `watch(model, mirror=Mirror(to="wandb", stats=["grad/*/rms"], every=100))`."""

    to: Any
    stats: Sequence[str] = DEFAULT_STATS
    """Patterns of series, or one."""
    scalars: str = "*"
    """A pattern of scalars. `"*"` leaves out those that sonde measures for its rules."""
    every: int = 10
    """Forward the stats of every n-th step. Scalars and findings are always forwarded."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"every= must be at least 1; got {self.every}.")
        if isinstance(self.stats, str):
            object.__setattr__(self, "stats", (self.stats,))
        for pattern in self.stats:
            kind, _, stat = _split(pattern)
            if not any(matches(kind, known) for known in KINDS):
                raise UnknownNameError("kind", kind, KINDS)
            if not any(matches_stat(stat, known) for known in (*STATS, *JOINED)):
                raise UnknownNameError("stat", stat, (*STATS, *JOINED))


def _split(pattern: str) -> Series:
    if pattern.count("/") != 2:
        raise UsageError(f'"{pattern}" does not name a stat to forward. Use kind/site/stat, such as "grad/*/norm".')
    return Series(*pattern.split("/"))


class Experiment:
    """A sink for any object with `log_metrics(values, step=…)`, such as Comet experiments and Lightning loggers."""

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
        """The tracker belongs to the user and stays open."""


def name_of(run: Mapping[str, Any]) -> str:
    """The name of a run where names must differ; a run without a name uses its id."""
    return str(run["id"]) if run["name"] in (None, run["id"]) else f"{run['name']}-{run['id']}"


def open_sink(to: Any) -> Sink:
    """The sink of that name; an error if it does not exist or cannot be opened."""
    if not isinstance(to, str):
        return to if hasattr(to, "numbers") else Experiment(to)
    # Adapters are plugins: this package must not import them.
    (entry,) = entry_points(group=GROUP, name=to)
    made: Callable[[], Sink] = entry.load()
    return made()


def _check(to: Any) -> None:
    """Reject anything that is not a tracker, before opening one."""
    known = sorted({entry.name for entry in entry_points(group=GROUP)})
    if isinstance(to, str):
        if to not in known:
            raise UnknownNameError("mirror", to, known)
    elif not (hasattr(to, "log_metrics") or all(hasattr(to, n) for n in ("begin", "numbers", "finding", "close"))):
        names = ", ".join(known)
        raise UsageError(f"mirror= must be {names}, or an object with log_metrics(); got {type(to).__name__}.")


def as_mirrors(mirror: Any) -> list[Mirror]:
    """Parse `mirror=`: "wandb", a `Mirror`, an object with `log_metrics`, or several of these. An unknown name is an
    error."""
    given = mirror if isinstance(mirror, list | tuple) else [] if mirror is None else [mirror]
    wanted = [one if isinstance(one, Mirror) else Mirror(to=one) for one in given]
    for one in wanted:
        _check(one.to)
    return wanted


def mirror_observers(mirrors: Iterable[Mirror], warn: Callable[[str], None]) -> list[MirrorObserver]:
    """Their observers. A tracker that cannot be opened is a warning, and training continues without it."""
    return [MirrorObserver(one, _name(one.to), _opened(one.to), warn) for one in mirrors]


def _name(to: Any) -> str:
    return to if isinstance(to, str) else type(to).__name__


def _opened(to: Any) -> Sink:
    try:
        return open_sink(to)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - their tracker failed, and the run does not need it
        return Unopened(error)


@dataclass(slots=True)
class MirrorObserver:
    """An `Observer` for one sink."""

    mirror: Mirror
    name: str
    sink: Sink
    warn: Callable[[str], None]
    _values: MirrorValues = field(init=False)
    _delivery: Delivery | None = None
    _findings: dict[int, str] = field(default_factory=dict)
    _has_warned: bool = False
    _step: int = 0

    def __post_init__(self) -> None:
        self._values = MirrorValues([_split(pattern) for pattern in self.mirror.stats], self.mirror.scalars)

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        for id, site in sites.items():
            self._values.add_site(id, site)
        for id, name in scalars.items():
            self._values.add_scalar(id, name)
        keys = ("id", "name", "project", "config", "tags", "notes")
        self._delivery = Delivery(self.sink, {key: content.get(key) for key in keys})

    def on_item(self, item: Item) -> None:
        assert self._delivery is not None, "begin() must be called first"
        if isinstance(item, NewSite):
            self._values.add_site(item.id, item.site)
        elif isinstance(item, NewScalar):
            self._values.add_scalar(item.id, item.name)
        elif isinstance(item, StatsRecord):
            self._step = item.step
            if item.step % self.mirror.every == 0:
                self._delivery.numbers(item.step, self._values.of_stats(item))
        elif isinstance(item, ScalarsRecord):
            for step, values in self._values.of_scalars(item).items():
                self._delivery.numbers(step, values)
        elif isinstance(item, NewAttempt):
            self._delivery.rewound(item.step)

    def on_outputs(self, items: Iterable[Output]) -> None:
        """Forward findings: each one once, and again when its severity changes."""
        for item in items:
            if isinstance(item, FindingRow) and self._delivery is not None:
                if self._findings.get(item.number) != item.severity:
                    self._delivery.finding(item)
                self._findings[item.number] = item.severity

    def poll(self, now: float) -> list[Output]:
        """The tracker's first failure, as soon as it is known."""
        if self._delivery is None or self._has_warned or not self._delivery.problem:
            return []
        if not self._delivery.has_begun:
            return [self._warned(f"it did not start: {self._delivery.problem}")]
        return [self._warned(f"{self._count()} so far; {self._delivery.problem}")]

    def close(self, status: RunStatus) -> None:
        if self._delivery is not None:
            self._delivery.close(status)

    def finish(self, end: float) -> list[Output]:
        """Wait until `end` for pending values, and report those that did not arrive."""
        why = self._delivery.wait(end) if self._delivery is not None else ""
        return [self._warned(f"{self._count()}; {why}")] if why else []

    def facts(self) -> dict[str, Any]:
        """Delivery counts for run.json."""
        delivery = self._delivery
        return {"to": self.name, "delivered": delivery.num_delivered, "of": delivery.num_given} if delivery else {}

    def fail(self, error: Exception) -> None:
        """An internal failure: the mirror receives no more records."""
        self._warned(f"{self._count()}; {type(error).__name__}: {error}")

    def _count(self) -> str:
        num, total = (self._delivery.num_delivered, self._delivery.num_given) if self._delivery else (0, 0)
        return f"{num:,} of {total:,} values delivered"

    def _warned(self, what: str) -> Event:
        message = f'the mirror "{self.name}": {what}. All values are in the run.'
        if not self._has_warned:
            self.warn(message)
        self._has_warned = True
        return Event(type="mirror", message=message, step=self._step, time=time.time(), severity="warning")


class Observers:
    """Runs the rules first, if there are any, then the mirrors, which also receive the findings. One that fails does
    not stop the others."""

    def __init__(self, rules: Observer | None) -> None:
        self._rules = rules
        self._mirrors: list[MirrorObserver] = []
        self._new: queue.SimpleQueue[MirrorObserver] = queue.SimpleQueue()
        self._sites: dict[int, Site] = {}
        self._scalars: dict[int, str] = {}
        self._content: Mapping[str, Any] = {}
        self._asked: list[Mirror] = []
        self.end: float | None = None
        """When the run must be over, by the monotonic clock; set when it ends."""

    def add(self, *mirror_observers: MirrorObserver) -> None:
        """Called from any thread; mirrors start on the writer thread. One that was added before would receive
        everything twice."""
        for mirroring in mirror_observers:
            if mirroring.mirror not in self._asked:
                self._asked.append(mirroring.mirror)
                self._new.put(mirroring)

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        self._sites, self._scalars, self._content = dict(sites), dict(scalars), content
        if self._rules is not None:
            self._rules.begin(sites, scalars, content)

    def on_item(self, item: Item) -> None:
        if isinstance(item, NewSite):
            self._sites[item.id] = item.site
        elif isinstance(item, NewScalar):
            self._scalars[item.id] = item.name
        if not self._new.empty():
            self._begin_new()
        if self._rules is not None:
            self._rules.on_item(item)
        for mirroring in self._mirrors:
            self._try(mirroring, lambda found: found.on_item(item))

    def poll(self, now: float) -> list[Output]:
        self._begin_new()
        outputs = self._forward([] if self._rules is None else list(self._rules.poll(now)))
        for mirroring in self._mirrors:
            self._try(mirroring, lambda found: outputs.extend(found.poll(now)))
        return outputs

    def finish(self, status: RunStatus) -> list[Output]:
        self._begin_new()
        outputs = self._forward([] if self._rules is None else list(self._rules.finish(status)))
        return outputs + self._deliver(status)

    def _deliver(self, status: RunStatus) -> list[Output]:
        """Finish all of them at the same time, within what is left of the deadline."""
        now = time.monotonic()
        end = now + CLOSE_S if self.end is None else now + _SHARE * (self.end - now)
        outputs: list[Output] = []
        for mirroring in self._mirrors:
            self._try(mirroring, lambda found: found.close(status))
        for mirroring in self._mirrors:
            self._try(mirroring, lambda found: outputs.extend(found.finish(end)))
        facts = [mirroring.facts() for mirroring in self._mirrors]
        return [*outputs, Facts({"mirrors": facts})] if facts else outputs

    def _forward(self, outputs: list[Output]) -> list[Output]:
        for mirroring in self._mirrors if outputs else ():
            self._try(mirroring, lambda found: found.on_outputs(outputs))
        return outputs

    def _begin_new(self) -> None:
        while not self._new.empty():
            mirroring = self._new.get()
            self._mirrors.append(mirroring)
            self._try(mirroring, lambda found: found.begin(self._sites, self._scalars, self._content))

    def _try(self, mirroring: MirrorObserver, work: Callable[[MirrorObserver], object]) -> None:
        try:
            work(mirroring)
        except Exception as error:  # noqa: BLE001 - a mirror that fails does not stop the rules and the other mirrors
            mirroring.fail(error)
            self._mirrors = [other for other in self._mirrors if other is not mirroring]
